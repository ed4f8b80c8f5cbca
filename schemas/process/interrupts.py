"""How a program ends that Ctrl-C interrupts before it can say how: by its exit code, without a traceback.

Must not import anything: what is imported before is not yet covered, and each start waits for it.
"""

EXIT_STOPPED = 130
"""A signal has ended it before it had an answer."""


class QuietInterrupt:
    """Ends the process with ``EXIT_STOPPED`` where Ctrl-C interrupts the body."""

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, _kind: object, error: object, _traceback: object) -> None:
        if isinstance(error, KeyboardInterrupt):
            raise SystemExit(EXIT_STOPPED) from None
