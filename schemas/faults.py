"""What a log may hold of an exception: where it was raised, and a bounded part of its message.

An exception's message can hold bytes from outside, and a frame's variables secrets: messages are escaped and
cut, variables are left out. The same fault may be hit a thousand times a second: a place is reported once a
minute. Must not write anything.
"""

import re
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

from schemas.error_roots import EdgeError
from schemas.text import printable

INTERVAL_S = 60.0
_MAX_PLACES = 256
_MAX_MESSAGE = 200
_MAX_FRAMES = 16
_MAX_CHAIN = 4
_MAX_READ = 4096
_OPAQUE = re.compile(r"[A-Za-z0-9_+=-]{32,}")


class FailedError(EdgeError):
    """The program has ended by a fault. The text is its summary; the traceback is in the log."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(summary(first_of(error)))


def traceback_text(error: BaseException) -> str:
    """Return the traceback of ``error`` and of what it came from, as several lines of printable ASCII."""
    return "\n".join(line for each in list(_chain(error))[:_MAX_CHAIN] for line in _lines(each))


def summary(error: BaseException) -> str:
    """Return the type of ``error`` and the beginning of its message, in one line."""
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 - an exception of others may have a broken __str__
        message = "(its message cannot be read)"
    message = without_secrets(message)
    name = type(error).__qualname__
    return printable(f"{name}: {message}" if message else name, _MAX_MESSAGE)


def without_secrets(text: str) -> str:
    """Return the beginning of ``text`` without long opaque words, as keys, tokens and session ids are."""
    return _OPAQUE.sub("(left out)", text[:_MAX_READ])


def place_of(error: BaseException) -> str:
    """Return where ``error`` was raised, and its type: what is the same for each time that it happens."""
    error = first_of(error)
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "?"
    return f"{where} {type(error).__qualname__}"


def first_of(error: BaseException) -> BaseException:
    """Return what went wrong first in the task groups that ``error`` came through."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error``, then what it came from and what it is a group of."""
    seen: set[int] = set()
    left = [error]
    while left:
        each = left.pop(0)
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        if isinstance(each, BaseExceptionGroup):
            left.extend(each.exceptions)
        origin = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
        if origin is not None:
            left.append(origin)


def _lines(error: BaseException) -> Iterator[str]:
    yield summary(error)
    for frame in reversed(traceback.extract_tb(error.__traceback__, limit=-_MAX_FRAMES)):
        yield printable(f"  {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}")


@dataclass(slots=True)
class _Place:
    """When faults of one place were reported last, and how many were suppressed since."""

    reported_s: float
    suppressed: int = 0


class OncePerPlace:
    """Limits reports to one a minute from each place in the code. May be called from any thread."""

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._places: dict[str, _Place] = {}
        self._lock = threading.Lock()

    def suppressed_before(self, place: str, now_s: float) -> int | None:
        """Return how many from ``place`` were suppressed since the last one; None if this is one of them."""
        with self._lock:
            known = self._places.get(place)
            if known is not None and now_s - known.reported_s < self._interval_s:
                known.suppressed += 1
                return None
            if known is None and len(self._places) >= _MAX_PLACES:
                # Places are lines of code: there are this many only if they are invented.
                del self._places[min(self._places, key=lambda each: self._places[each].reported_s)]
            self._places[place] = _Place(now_s)
            return known.suppressed if known is not None else 0
