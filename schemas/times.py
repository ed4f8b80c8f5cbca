"""Times: as people and models read them, durations as people write them, and the earliest that is credible.

Times are ISO 8601 in UTC beside the milliseconds that programs compare; durations are ``15m`` or ``1h30m``,
the one form of options and settings. Must not read a clock, nor know what a duration is for.
"""

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, NewType

from schemas.error_roots import OperatorError

_MS = "_ms"
_A_MOMENT = 1_000_000_000_000
"""A number of at least this, or a schema with this minimum, is of a moment in ms since 1970: no duration is
thirty years."""
_SCALARS = (str, int, float)
_END_MS = 253_402_300_800_000  # the year 10000, which this form has no room for


def iso(ms: int) -> str:
    """Return a moment in ms since 1970 as ISO 8601.

    >>> iso(1760000000007)
    '2025-10-09T08:53:20.007Z'
    """
    return f"{_second(ms // 1000)}.{ms % 1000:03}Z"


@lru_cache(maxsize=64)  # the answers of a moment are of one second, and a calendar costs more than the rest
def _second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).replace(tzinfo=None).isoformat()


def moments_of(schema: Mapping[str, Any]) -> dict[str, str]:
    """Return the members of ``schema`` that are moments, each with the name of its ISO form: ``ts``."""
    members: Mapping[str, Any] = schema.get("properties", {})
    return {
        name: name.removesuffix(_MS)
        for name, rules in members.items()
        if name.endswith(_MS) and rules.get("minimum", 0) >= _A_MOMENT
        if name.removesuffix(_MS) not in members
    }


def with_iso(value: Mapping[str, Any], moments: Mapping[str, str]) -> dict[str, Any]:
    """Return ``value`` with the ISO form of its ``moments`` beside each of them."""
    shown: dict[str, Any] = {}
    for name, member in value.items():
        shown[name] = member
        # It may be null, and 1.0 is an integer to JSON Schema.
        if name in moments and isinstance(member, int | float) and 0 <= member < _END_MS:
            shown[moments[name]] = iso(int(member))
    return shown


def dated(value: Any) -> Any:
    """Return a JSON document for a model: each moment in it has its ISO form beside it, whatever its schema.

    >>> dated({"ts_ms": 1760000000007, "took_ms": 5})
    {'ts_ms': 1760000000007, 'ts': '2025-10-09T08:53:20.007Z', 'took_ms': 5}
    """
    if value is None or isinstance(value, _SCALARS):
        return value
    if not isinstance(value, Mapping):
        return [dated(item) for item in value]
    shown: dict[str, Any] = {}
    for name, member in value.items():
        shown[name] = dated(member)
        # Each call passes here: most members end with the first question.
        if name.endswith(_MS) and isinstance(member, int | float) and _A_MOMENT <= member < _END_MS:
            short = name.removesuffix(_MS)
            if short and short not in value:
                shown[short] = iso(int(member))
    return shown


SystemMs = NewType("SystemMs", int)
"""A moment by the system's clock, which can be set, forwards and back: for records."""
SystemClock = Callable[[], SystemMs]
RelayMs = NewType("RelayMs", int)
"""A moment by the relay's clock, which follows the system's without its steps: for what expires."""
ValidityClock = Callable[[], RelayMs]

FIRST_CREDIBLE_MS = 1_700_000_000_000
"""2023-11-14: a clock that reads less has not been set, and nothing is published or accepted by it."""


def is_credible(ms: int) -> bool:
    """Return whether a clock that has been set can read ``ms``, and this form can show it."""
    return FIRST_CREDIBLE_MS <= ms < _END_MS


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
