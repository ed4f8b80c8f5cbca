"""Formats a result for a terminal. Must not be used for what a program or a model reads."""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from relay.ascii_json import encoded
from schemas.text import printable

_GIB = 1024**3
_MAX_OTHER = 96
_WORDED = frozenset(
    {"node_id", "ts_ms", "ts", "message", "received_at_ms", "received_at"}
    | {"uptime_s", "cpu", "mem", "load", "disk"}
)


def lines_of(result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield ``(label, text)`` for each line of a result; every text is printable.

    An echo and a metrics sample are worded; a member of another kind is shown as it is.
    """
    if "message" in result:
        yield "message", printable(result["message"])
    if "received_at_ms" in result:
        received = datetime.fromtimestamp(result["received_at_ms"] / 1000, UTC)
        yield "received", received.isoformat(sep=" ", timespec="milliseconds")
    if "uptime_s" in result:
        yield "uptime", str(timedelta(seconds=result["uptime_s"]))
    if "cpu" in result:
        yield "cpu", f"{result['cpu']['usage_pct']:.1f} % of {result['cpu']['cores']} cores"
    if "mem" in result:
        memory = result["mem"]
        yield "memory", f"{_gib(memory['available_bytes'])} available of {_gib(memory['total_bytes'])}"
    if "load" in result:
        load = result["load"]
        yield "load", f"{load['one']:.2f}  {load['five']:.2f}  {load['fifteen']:.2f}"
    for disk in result.get("disk", ()):
        free = f"{_gib(disk['available_bytes'])} available of {_gib(disk['total_bytes'])}"
        yield "disk", f"{printable(disk['mount'], 40)} ({printable(disk['fs_type'], 12)})  {free}"
    for name, value in result.items():
        if name not in _WORDED:
            yield name, printable(value if isinstance(value, str) else encoded(value), _MAX_OTHER)


def _gib(count: int) -> str:
    return f"{count / _GIB:.1f} GiB"
