"""The log of a program: one line an event on standard error, for people on a terminal, JSON elsewhere.

What libraries log is included, and uncaught exceptions: escaped, and each place in the code once a minute.
``component`` is the program's name, in every line. Must not be given raw text from outside: escape it with
``schemas.text.printable`` first.
"""

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Protocol, TextIO

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor

from schemas.faults import FailedError, OncePerPlace, place_of, summary, traceback_text, without_secrets
from schemas.lines import LineWriter, LogThreshold
from schemas.text import printable

_PLACE = "place_of_fault"


class LogStream(Protocol):
    """Where lines go: a stream, or a writer with a thread of its own."""

    def write(self, line: str, /) -> object:
        """Write a line."""

    def isatty(self) -> bool:
        """Return whether it is a terminal."""


def make_logger(  # noqa: PLR0913 - what comes in from outside
    component: str,
    lines: LogStream,
    *,
    threshold: LogThreshold | None = None,
    to_journal: bool = False,
    monotonic: Callable[[], float] = time.monotonic,
    on_fault: Callable[[str], None] = lambda _: None,
) -> FilteringBoundLogger:
    """Return a logger that writes to ``lines`` what ``threshold`` admits, by default from info on.

    With ``to_journal`` each line has its priority in front, as systemd's journal reads it.

    A line with ``exc_info`` is a fault: it gets the traceback. ``on_fault`` is called with its source, a
    library or ``component``, also for a line that is left out because its place was logged a moment ago.
    """
    logger: FilteringBoundLogger = structlog.wrap_logger(
        _Written(lines),
        processors=[
            _Filter(threshold or LogThreshold()),
            _Faults(component, monotonic, on_fault),
            *_rendering(component, is_terminal=lines.isatty(), to_journal=to_journal),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
    )
    return logger


@contextmanager
def open_log(
    component: str,
    stream: TextIO,
    *,
    threshold: LogThreshold | None = None,
    on_fault: Callable[[str], None] = lambda _: None,
    on_lost: Callable[[int], None] = lambda _: None,
) -> Iterator[tuple[FilteringBoundLogger, LineWriter]]:
    """Hold the log of a long-running program and its line writer; ``stream`` may block or fail.

    The log includes what libraries log, and exceptions that were not caught in this event loop or in threads.
    """
    to_journal = is_journal(stream, os.environ)
    lost_line = _lost_line(component, is_terminal=stream.isatty(), to_journal=to_journal)
    lines = LineWriter(stream, lost_line, on_lost)
    try:
        log = make_logger(component, lines, threshold=threshold, to_journal=to_journal, on_fault=on_fault)
        with _forwarding(log):
            yield log, lines
    finally:
        lines.close()


@contextmanager
def fatal_errors_logged(log: FilteringBoundLogger) -> Iterator[None]:
    """Log the exception that ends the program, which must not be printed unescaped.

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

    def __init__(self, lines: LogStream) -> None:
        self._lines = lines

    def msg(self, message: str) -> None:
        self._lines.write(message + "\n")

    log = debug = info = warn = warning = fatal = failure = err = error = critical = exception = msg


class _Filter:
    """Drops the lines below a threshold that may change: the logger's own cannot."""

    def __init__(self, threshold: LogThreshold) -> None:
        self._threshold = threshold

    def __call__(self, _logger: object, method: str, line: EventDict) -> EventDict:
        if not self._threshold.admits(method):
            raise structlog.DropEvent
        return line


class _Faults:
    """Turns an exception into a text for the log, and drops what was logged within the last minute."""

    def __init__(
        self, component: str, monotonic: Callable[[], float], on_fault: Callable[[str], None]
    ) -> None:
        self._component = component
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
            self._on_fault(line.get("library", self._component))
        repeated = self._once.suppressed_before(place, self._monotonic())
        if repeated is None:
            raise structlog.DropEvent
        if error is not None:
            line.update(error=summary(error), exception=traceback_text(error))
        if repeated:
            line["kept_back"] = repeated
        return line


def _rendering(component: str, *, is_terminal: bool, to_journal: bool) -> list[Processor]:
    if not is_terminal:
        json_lines: list[Processor] = [_with_head(component), structlog.processors.JSONRenderer()]
        return [*json_lines, _with_priority] if to_journal else json_lines
    stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)
    return [structlog.processors.add_log_level, stamp, structlog.dev.ConsoleRenderer(colors=True)]


def _with_head(component: str) -> Processor:
    """Put what every line has in front: when, how grave, of which program, what has happened."""

    def with_head(_logger: object, method: str, line: EventDict) -> EventDict:
        now = datetime.now(UTC).isoformat(timespec="milliseconds").removesuffix("+00:00")
        return {
            "ts": f"{now}Z",
            "level": _level_of(method),
            "component": component,
            "event": line.pop("event"),
            **line,
        }

    return with_head


def _with_priority(_logger: object, method: str, line: Any) -> str:
    return with_priority(_level_of(method), str(line))


def _level_of(method: str) -> str:
    return str(structlog.processors.add_log_level(None, method, {})["level"])


def _lost_line(component: str, *, is_terminal: bool, to_journal: bool) -> Callable[[int], str]:
    rendered = structlog.wrap_logger(
        structlog.ReturnLogger(),
        processors=_rendering(component, is_terminal=is_terminal, to_journal=to_journal),
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
    )
    return lambda count: f"{rendered.warning('log lines lost', count=count)}\n"


class _Libraries(logging.Handler):
    """Forwards what libraries log, which may quote text from outside."""

    def __init__(self, log: FilteringBoundLogger) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, asyncio.CancelledError):
            return  # the program itself has cancelled it
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
def _forwarding(log: FilteringBoundLogger) -> Iterator[None]:
    """Forward to ``log`` what libraries log, and exceptions that reach the loop or the end of a thread."""
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


_PRIORITIES = MappingProxyType({"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2})


def is_journal(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Return whether ``stream`` is the one that systemd has connected to the journal (systemd.exec(5))."""
    try:
        facts = os.fstat(stream.fileno())
    except (OSError, ValueError):  # closed, or no file
        return False
    return environment.get("JOURNAL_STREAM") == f"{facts.st_dev}:{facts.st_ino}"


def with_priority(level: str, line: str) -> str:
    """Return ``line``, of ``level``, as the journal reads its priority."""
    return f"<{_PRIORITIES.get(level, _PRIORITIES['info'])}>{line}"
