"""A monotonic clock that a test sets."""


class Seconds:
    """Stands for the time in seconds wherever a ``monotonic`` callable is asked for."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now
