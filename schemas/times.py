"""Times as people and models read them: ISO 8601 in UTC, beside the milliseconds that programs compare.

Must not read a clock.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

_MS = "_ms"
_A_MOMENT = 1_000_000_000_000
"""A number of at least this, or a schema with this minimum, is of a moment in ms since 1970: no duration is
thirty years."""
_END_MS = 253_402_300_800_000  # the year 10000, which this form has no room for


def iso(ms: int) -> str:
    """Return a moment in ms since 1970 as ISO 8601.

    >>> iso(1760000000007)
    '2025-10-09T08:53:20.007Z'
    """
    moment = datetime.fromtimestamp(ms // 1000, UTC).replace(microsecond=ms % 1000 * 1000)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


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
        if name in moments and 0 <= member < _END_MS:
            shown[moments[name]] = iso(int(member))  # 1.0 is an integer to JSON Schema
    return shown


def dated(value: Any) -> Any:
    """Return a JSON document for a model: each moment in it has its ISO form beside it, whatever its schema.

    >>> dated({"ts_ms": 1760000000007, "took_ms": 5})
    {'ts_ms': 1760000000007, 'ts': '2025-10-09T08:53:20.007Z', 'took_ms': 5}
    """
    if isinstance(value, list | tuple):
        return [dated(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    moments = {
        name: short
        for name, member in value.items()
        if (short := name.removesuffix(_MS)) not in {name, "", *value}
        if isinstance(member, int | float) and _A_MOMENT <= member < _END_MS
    }
    return {name: dated(member) for name, member in with_iso(value, moments).items()}
