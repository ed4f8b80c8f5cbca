"""The relay's log: one line an event on standard error, for people on a terminal, JSON elsewhere.

What libraries log comes here too, and exceptions that were not caught: escaped, and each place in the code
once a minute. The module is the same in both programs, which cannot share it: a test compares them. Must not
be given raw text from outside: escape it with ``schemas.text.printable`` first.
"""

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, TextIO

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor

from schemas.faults import FailedError, OncePerPlace, place_of, summary, traceback_text, without_secrets
from schemas.lines import LineWriter
from schemas.text import printable

_PLACE = "place_of_fault"


class Lines(Protocol):
    """Where lines go: a stream, or what writes to one in its own time."""

    def write(self, line: str, /) -> object:
        """Take a line."""

    def isatty(self) -> bool:
        """Tell whether a person looks at it."""


def make_logger(
    lines: Lines,
    *,
    monotonic: Callable[[], float] = time.monotonic,
    on_fault: Callable[[str], None] = lambda _: None,
) -> FilteringBoundLogger:
    """Return a logger that writes to ``lines``.

    A line with ``exc_info`` is a fault: it gets the traceback. ``on_fault`` is called with its source, a
    library or "relay", also where the line is left out because the same place was told of a moment ago.
    """
    logger: FilteringBoundLogger = structlog.wrap_logger(
        _Written(lines),
        processors=[_Faults(monotonic, on_fault), *_rendering(is_terminal=lines.isatty())],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
    )
    return logger


@contextmanager
def opened(
    stream: TextIO,
    *,
    on_fault: Callable[[str], None] = lambda _: None,
    on_lost: Callable[[int], None] = lambda _: None,
) -> Iterator[tuple[FilteringBoundLogger, LineWriter]]:
    """Hold the log of a program that runs for long, and where its lines go; ``stream`` may block or fail.

    Meanwhile what libraries log is in it, and what was not caught in this event loop and in threads.
    """
    lines = LineWriter(stream, _lost_line(is_terminal=stream.isatty()), on_lost)
    try:
        log = make_logger(lines, on_fault=on_fault)
        with _listening(log):
            yield log, lines
    finally:
        lines.close()


@contextmanager
def last_words(log: FilteringBoundLogger) -> Iterator[None]:
    """Log what ends the program, which must not be shown as it stands.

    Raises:
        FailedError: in place of any other exception.
    """
    try:
        yield
    except Exception as error:
        log.critical("program fails", exc_info=error)
        raise FailedError(error) from None


class _Written:
    """The end of the chain: what is rendered becomes a line."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines

    def msg(self, message: str) -> None:
        """Write ``message``."""
        self._lines.write(message + "\n")

    log = debug = info = warn = warning = fatal = failure = err = error = critical = exception = msg


class _Faults:
    """Turns an exception into the text that a log may have, and drops what was told a moment ago."""

    def __init__(self, monotonic: Callable[[], float], on_fault: Callable[[str], None]) -> None:
        self._monotonic = monotonic
        self._on_fault = on_fault
        self._once = OncePerPlace()

    def __call__(self, _logger: object, method: str, line: EventDict) -> EventDict:
        error = line.pop("exc_info", None)
        if error is True:
            error = sys.exc_info()[1]
        place = line.pop(_PLACE, None)
        if error is not None:
            place = place_of(error)
        if place is None:
            return line
        if error is not None or method in {"error", "exception", "critical"}:
            self._on_fault(line.get("library", "relay"))
        repeated = self._once.is_told(place, self._monotonic())
        if repeated is None:
            raise structlog.DropEvent
        if error is not None:
            line.update(error=summary(error), exception=traceback_text(error))
        if repeated:
            line["kept_back"] = repeated
        return line


def _rendering(*, is_terminal: bool) -> list[Processor]:
    renderer: Processor = (
        structlog.dev.ConsoleRenderer(colors=True) if is_terminal else structlog.processors.JSONRenderer()
    )
    stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)
    return [structlog.processors.add_log_level, stamp, renderer]


def _lost_line(*, is_terminal: bool) -> Callable[[int], str]:
    rendered = structlog.wrap_logger(
        structlog.ReturnLogger(),
        processors=_rendering(is_terminal=is_terminal),
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
    )
    return lambda count: f"{rendered.warning('log lines lost', count=count)}\n"


class _Libraries(logging.Handler):
    """Passes on what libraries log, which may quote what came from outside."""

    def __init__(self, log: FilteringBoundLogger) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Pass on ``record``."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, asyncio.CancelledError):
            return  # how work ends that the program itself ends
        try:
            text = record.getMessage()
        except (TypeError, ValueError, KeyError):  # the arguments do not fit the message
            text = str(record.msg)
        place = {} if error is not None else {_PLACE: f"{record.pathname}:{record.lineno}"}
        level = logging.ERROR if record.levelno >= logging.ERROR else logging.WARNING
        self._log.log(
            level,
            "a library reports",
            library=printable(record.name.partition(".")[0], 32),
            text=printable(without_secrets(text.strip())),
            exc_info=error,
            **place,
        )


@contextmanager
def _listening(log: FilteringBoundLogger) -> Iterator[None]:
    """Pass on to ``log`` what libraries log, and exceptions that reach the loop or the end of a thread."""
    loop, root, handler = asyncio.get_running_loop(), logging.getLogger(), _Libraries(log)

    def in_loop(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # asyncio quotes the arguments of a callback, in brackets.
        text = printable(context["message"].partition("(")[0])
        error, task = context.get("exception"), context.get("task") or context.get("future")
        of = task.get_coro() if isinstance(task, asyncio.Task) else None
        name = getattr(of, "__qualname__", None)
        place = {} if error is not None else {_PLACE: f"{text} {name}"}
        log.error("fault in the background", library="asyncio", text=text, of=name, exc_info=error, **place)

    def in_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None:
            log.error("fault in a thread", of=args.thread and args.thread.name, exc_info=args.exc_value)

    def unraisable(args: Any) -> None:
        if args.exc_value is not None:
            log.error("fault while an object was removed", exc_info=args.exc_value)

    with ExitStack() as after:
        after.callback(loop.set_exception_handler, loop.get_exception_handler())
        loop.set_exception_handler(in_loop)
        after.callback(setattr, threading, "excepthook", threading.excepthook)
        threading.excepthook = in_thread
        after.callback(setattr, sys, "unraisablehook", sys.unraisablehook)
        sys.unraisablehook = unraisable
        after.callback(root.removeHandler, handler)
        root.addHandler(handler)
        after.callback(logging.captureWarnings, False)  # noqa: FBT003 - the standard library's own
        logging.captureWarnings(capture=True)
        yield
