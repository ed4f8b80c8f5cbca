"""Durations as people write them: ``15m``, ``90s``, ``1h30m``. The one form of options and settings.

Must not know what a duration is for, nor its bounds.
"""

import re
from collections.abc import Callable

from schemas.error_roots import OperatorError

_UNITS_MS = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1000, "ms": 1}
_FORM = re.compile("".join(rf"(?:([0-9]{{1,9}}){unit})?" for unit in _UNITS_MS))


class DurationError(OperatorError):
    """It is not a duration, or not one that is allowed; the text says what to write."""


def parse_duration_ms(text: str) -> int:
    """Return the milliseconds of ``text``: numbers with the units d, h, m, s and ms, in that order.

    >>> parse_duration_ms("1h30m")
    5400000

    Raises:
        DurationError: it is not of that form, or no time at all.
    """
    match = _FORM.fullmatch(text)
    counts = match.groups(default="0") if match is not None else ()
    total = sum(int(count) * ms for count, ms in zip(counts, _UNITS_MS.values(), strict=False))
    if total == 0:
        raise DurationError(f"{text!r} is not a duration: write 90s, 15m, 1h30m or 30d")
    return total


def duration_between(least: str, most: str) -> Callable[[str], int]:
    """Return what parses the milliseconds of a duration from ``least`` to ``most``."""
    least_ms, most_ms = parse_duration_ms(least), parse_duration_ms(most)

    def parse(text: str) -> int:
        ms = parse_duration_ms(text)
        if not least_ms <= ms <= most_ms:
            raise DurationError(f"{text} is not from {least} to {most}")
        return ms

    return parse


def parse_duration_s(text: str) -> int:
    """Return the whole seconds of ``text``.

    Raises:
        DurationError: as ``parse_duration_ms``, or it has a fraction of a second.
    """
    seconds, rest = divmod(parse_duration_ms(text), 1000)
    if rest:
        raise DurationError(f"{text!r} is not of whole seconds: write 90s, 15m, 1h30m or 30d")
    return seconds


def duration_text(ms: int) -> str:
    """Return ``ms`` as ``parse_duration_ms`` reads it.

    >>> duration_text(5_400_000)
    '1h30m'
    """
    text = ""
    for unit, unit_ms in _UNITS_MS.items():
        count, ms = divmod(ms, unit_ms)
        text += f"{count}{unit}" if count else ""
    return text
