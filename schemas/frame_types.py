"""The two ends of a session, and the types of its one-way frames: those that no other frame answers.

A new type is one row here, its document ``session.<type>@1.0.0`` and its payload in ``payloads``. Each has
a size limit and a rate of its own. They apply at both ends, before a payload is validated: frames over them
are dropped and counted, and all other frames of the session pass. Must not know what a frame is for.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Self

from schemas.token_bucket import TokenBucket


class Role(StrEnum):
    """Which end this is."""

    RELAY = "relay"
    NODE = "node"


class OneWayType(StrEnum):
    """The one-way types. A row is: name, sender, size limit in bytes, frames a second, frames at once.

    Attributes:
        sender: the end that may send it, in an open session.
        max_bytes: of the whole frame.
        per_s: the rate that the receiver accepts.
        burst: how many it accepts at once.
    """

    TELEMETRY_LEASE = "telemetry_lease", Role.RELAY, 2048, 4.0, 64.0
    TELEMETRY = "telemetry", Role.NODE, 64 * 1024, 4.0, 16.0
    # Caller tools: a burst holds all sessions of a node, or all requests of its local agent, after a resume.
    SESSION_OPEN = "session_open", Role.RELAY, 256 * 1024, 16.0, 256.0
    SESSION_MESSAGE = "session_message", Role.RELAY, 256 * 1024, 16.0, 128.0
    SESSION_END = "session_end", Role.RELAY, 1024, 64.0, 256.0
    CALLER_TOOL_RESULT = "caller_tool_result", Role.RELAY, 256 * 1024, 500.0, 1024.0
    SESSION_EVENT = "session_event", Role.NODE, 256 * 1024, 16.0, 128.0
    CALLER_TOOL = "caller_tool", Role.NODE, 256 * 1024, 500.0, 1024.0
    CALLER_TOOL_CANCEL = "caller_tool_cancel", Role.NODE, 1024, 500.0, 1024.0

    sender: Role
    max_bytes: int
    per_s: float
    burst: float

    def __new__(cls, name: str, sender: Role, max_bytes: int, per_s: float, burst: float) -> Self:
        """Make the member of one row."""
        member = str.__new__(cls, name)
        member._value_ = name
        member.sender, member.max_bytes, member.per_s, member.burst = sender, max_bytes, per_s, burst
        return member


ONE_WAY = {type_.value: type_ for type_ in OneWayType}
"""The one-way types by name."""


class FrameBudgets:
    """The rates of the one-way frames of one connection, for one end. ``seconds`` is a monotonic clock."""

    __slots__ = ("_buckets", "_role", "_seconds")

    def __init__(self, role: Role, seconds: Callable[[], float]) -> None:
        self._role = role
        self._seconds = seconds
        self._buckets: dict[OneWayType, TokenBucket] = {}

    def take(self, type_: OneWayType) -> float:
        """Count a frame of ``type_`` and return 0, or count nothing and return the seconds until one fits."""
        now = self._seconds()
        bucket = self._buckets.get(type_)
        if bucket is None:
            # What a sender spaces out can arrive closer together: it sends half of what is accepted at once.
            burst = max(1.0, type_.burst / 2) if type_.sender is self._role else type_.burst
            bucket = self._buckets[type_] = TokenBucket(type_.per_s, burst, now)
        return bucket.take(now)
