"""The console script ``relay``: runs the command line, and ends an expected error with one line.

Must not import more than the standard library and ``schemas`` before it can report an error: a node's
installation has this script, but not the relay's dependencies.
"""

import sys
from io import TextIOWrapper

from relay.cli.exits import fail
from schemas.process.command_errors import EXIT_CANNOT_RUN, errors_in_one_line

_OUR_PACKAGES = frozenset({"relay", "schemas"})


def main() -> None:
    """Run the command line. An operator's mistake is one line; a fault of our own has a traceback."""
    if isinstance(sys.stdout, TextIOWrapper):
        # A terminal of another encoding shows an escape for a letter that it lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    with errors_in_one_line(fail):
        try:
            from relay.cli.main import app  # noqa: PLC0415 - so that a missing dependency can be reported

            app()
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package in _OUR_PACKAGES:
                raise
            fail(
                f"{package} is not installed; the relay's programs need: pip install 'edge-kubelet[relay]'",
                EXIT_CANNOT_RUN,
            )
