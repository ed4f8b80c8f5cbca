"""The console script ``kubelet``, which Ctrl-C ends in order also while the command line is loaded.

Must not import anything else itself.
"""

from schemas.process.interrupts import QuietInterrupt


def main() -> None:
    """Run the command line."""
    with QuietInterrupt():
        from kubelet.cli.commands import main as run  # noqa: PLC0415 - it is what takes long to load

        run()
