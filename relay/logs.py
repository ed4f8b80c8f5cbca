"""The relay's log: one line an event on standard error, for people on a terminal, JSON elsewhere.

Must not be given raw text from outside: escape it with ``schemas.text.printable`` first.
"""

import logging
from contextlib import suppress
from typing import TextIO

import structlog


class _Forgiving(structlog.PrintLogger):
    """Writes lines, and loses those that cannot be written: a full disk or a dead reader must end nothing."""

    def msg(self, message: str) -> None:
        """Write a line if that can be done."""
        with suppress(OSError, ValueError):
            super().msg(message)

    log = debug = info = warn = warning = fatal = failure = err = error = critical = exception = msg


def make_logger(stream: TextIO) -> structlog.typing.FilteringBoundLogger:
    """Return a logger that writes to ``stream``."""
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(colors=True) if stream.isatty() else structlog.processors.JSONRenderer()
    )
    logger: structlog.typing.FilteringBoundLogger = structlog.wrap_logger(
        _Forgiving(stream),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
    )
    return logger
