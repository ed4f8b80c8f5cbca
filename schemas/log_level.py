"""The level from which on a program logs, which can be changed while it runs. Must not write a line."""

from enum import StrEnum

_RANKS = {"debug": 0, "info": 1, "warning": 2, "error": 3, "critical": 4}


class LogLevel(StrEnum):
    """The levels that the operator can choose."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogThreshold:
    """Decides which lines are logged. ``level`` may be changed."""

    def __init__(self, level: LogLevel = LogLevel.INFO) -> None:
        self.level = level

    def admits(self, level: str) -> bool:
        """Return whether a line of ``level`` is logged."""
        return _RANKS[level] >= _RANKS[self.level]
