"""The frames of the session between relay and node: one JSON object each, closed schemas.

A new type that no other frame answers is one row of ``ONE_WAY``, its document ``session.<type>@1.0.0`` and
its payload in ``payloads``. Each has a size limit and a rate of its own, which apply at both ends before a
payload is validated: frames over them are dropped and counted, and all others pass. Must not know in which
state a session is: that is ``session``.
"""

import json
import re
from collections.abc import Callable, Collection
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple, Self

from schemas.error_roots import PeerError
from schemas.pacing import TokenBucket
from schemas.registry import SchemaRegistry, Validator
from schemas.strict_json import JsonReason, StrictJsonError, loads


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
    # Once a minute at most, and at each new connection. A relay before protocol 1.2 does not know it.
    FINDINGS = "findings", Role.NODE, 8 * 1024, 1.0, 16.0

    sender: Role
    max_bytes: int
    per_s: float
    burst: float

    def __new__(cls, name: str, sender: Role, max_bytes: int, per_s: float, burst: float) -> Self:
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


SUBPROTOCOL = "edge-kubelet.v1"
SUBPROTOCOL_1_1 = "edge-kubelet.v1.1"
"""The relay sends an echo after each welcome, and ``heartbeat_ack`` may name what the broker sent it."""
SUBPROTOCOL_1_2 = "edge-kubelet.v1.2"
"""``cmd.deadline_ms`` is what is left of the call; the node bounds its handler by what it has announced.

``cmd_ack`` marks what the board's owner does not allow, ``welcome`` names the kinds that the relay knows, and
``findings`` tells the relay what of ``linux.health`` is open.
"""
SUBPROTOCOLS = (SUBPROTOCOL_1_2, SUBPROTOCOL_1_1, SUBPROTOCOL)
"""The newest first, each with all that those after it have: a node offers all, and the relay chooses."""
MAX_FRAME_BYTES = 256 * 1024
MAX_FRAME_BYTES_BEFORE_WELCOME = 8 * 1024

_NEWER = MappingProxyType({"cmd_ack": "1.1.0", "heartbeat_ack": "1.1.0", "welcome": "1.1.0"})
"""The documents that have a newer version than 1.0.0. It accepts what the version before accepts."""

_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)

FRAME_TYPES = (
    "challenge",
    "auth",
    "welcome",
    "announce",
    "announce_ack",
    "heartbeat",
    "heartbeat_ack",
    "cmd",
    "cmd_ack",
    "cmd_cancel",
    "renew",
    "renew_ack",
    "retire",
    "retire_ack",
    "bye",
    *ONE_WAY,
)


class FrameReason(StrEnum):
    """Why JSON that was accepted is not a frame; the texts are safe to log."""

    UNKNOWN_TYPE = "an unknown frame type"
    INVALID = "does not fit the schema of its type"
    ESCAPED_ANNOUNCE = "escapes in an announce outside of its payload"
    OVERSIZED = "over the size limit of its type"
    OVER_RATE = "over the rate of its type"


class FrameError(PeerError):
    """Bytes that are not a frame. ``type`` is the frame's type where it is known."""

    def __init__(self, reason: JsonReason | FrameReason, type_: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.type = type_


# An announce with its members in any order and any space between them; the group is the payload's text. What
# surrounds the group is complete members without a brace, so in a text that is known to be JSON with exactly
# these members, the group can only be the payload.
_SPACE = r"[ \t\n\r]*+"
_MEMBER = rf'"(?:type"{_SPACE}:{_SPACE}"announce|msg_id"{_SPACE}:{_SPACE}"[0-9A-Z]{{26}})"'
_ANNOUNCE = re.compile(
    rf'{_SPACE}\{{{_SPACE}(?:{_MEMBER}{_SPACE},{_SPACE}){{0,2}}"payload"{_SPACE}:{_SPACE}'
    rf"(\{{.*\}}){_SPACE}(?:,{_SPACE}{_MEMBER}{_SPACE}){{0,2}}\}}{_SPACE}",
    re.DOTALL,
)


# The same as `Frame.encode` writes it, up to the payload, behind which there is a brace.
_ENCODED_ANNOUNCE = re.compile(r'\{"type":"announce","msg_id":"([0-9A-HJKMNP-TV-Z]{26})","payload":')


class Frame(NamedTuple):
    """One message of a session.

    Attributes:
        msg_id: a ULID in upper case, as ``in_reply_to``.
        payload: of the type in ``payloads`` that is named for this type of frame; None of an ``announce``
            that was not parsed.
        wire: the text of an ``announce``'s payload, the bytes that were signed: ``encode`` writes them;
            of another type of frame always empty.
    """

    type: str
    msg_id: str
    payload: Any
    in_reply_to: str | None = None
    wire: bytes = b""

    def encode(self) -> str:
        """Return the frame as the text that travels: no spaces, and ASCII but for what was signed otherwise.

        Raises:
            ValueError: the payload holds a number that JSON cannot express, or ``wire`` is not UTF-8.
        """
        return encoded(self.type, self.msg_id, self.wire or self.payload, self.in_reply_to)


def encoded(type_: str, msg_id: str, payload: Any, in_reply_to: str | None = None) -> str:
    """Return a frame as ``Frame.encode`` does; a ``payload`` of bytes is JSON, and is written as it is.

    Raises:
        ValueError: the payload holds a number that JSON cannot express, or is bytes that are not UTF-8.
    """
    # Type and ids are tokens: no character of theirs needs an escape.
    reply = "" if in_reply_to is None else f'"in_reply_to":"{in_reply_to}",'
    text = payload.decode("utf-8") if isinstance(payload, bytes) else _ENCODER.encode(payload)
    return f'{{"type":"{type_}","msg_id":"{msg_id}",{reply}"payload":{text}}}'


class FrameReader:
    """Turns texts into frames. Compiles a frame's document when one of its type first comes in.

    Each end receives only some of the types, and a compiled document takes a quarter of a mebibyte.
    """

    def __init__(self, registry: SchemaRegistry) -> None:
        self._registry = registry
        self._validators: dict[str, Validator] = {}

    def read(
        self, text: str | bytes, max_bytes: int, wait_s: Callable[[OneWayType], float] = lambda _: 0.0
    ) -> Frame:
        """Return the frame that ``text``, of at most ``max_bytes``, holds.

        An ``announce`` is parsed as a whole, once, and the text of its payload is cut out beside it. A
        one-way frame is validated only if it is within the limits of its type: ``wait_s`` counts it, and
        returns 0 if the rate allows it.

        Raises:
            FrameError: too large, not strict JSON, an unknown type, or not of that type's schema.
        """
        try:
            message = loads(text, max_bytes=max_bytes)
        except StrictJsonError as error:
            raise FrameError(error.reason) from None
        type_ = message.get("type") if isinstance(message, dict) else None
        if type_ not in FRAME_TYPES:
            raise FrameError(FrameReason.UNKNOWN_TYPE)
        if (one_way := ONE_WAY.get(type_)) is not None:
            if size_of(text) > one_way.max_bytes:
                raise FrameError(FrameReason.OVERSIZED, type_)
            if wait_s(one_way) > 0:
                raise FrameError(FrameReason.OVER_RATE, type_)
        if not self._validator(type_).is_valid(message):
            raise FrameError(FrameReason.INVALID, type_)
        wire = _payload_text(text) if type_ == "announce" else b""
        return Frame(message["type"], message["msg_id"], message["payload"], message.get("in_reply_to"), wire)

    def _validator(self, type_: str) -> Validator:
        known = self._validators.get(type_)
        if known is None:
            known = self._validators[type_] = self._registry.load(document_of(type_))
        return known


def agreed(offered: Collection[str]) -> str | None:
    """Return the newest subprotocol among those that a node has ``offered``; None if it speaks none."""
    return next((name for name in SUBPROTOCOLS if name in offered), None)


def includes(agreed_upon: str | None, version: str) -> bool:
    """Return whether a connection on which ``agreed_upon`` is spoken has what ``version`` added."""
    return agreed_upon in SUBPROTOCOLS[: SUBPROTOCOLS.index(version) + 1]


def document_of(type_: str) -> str:
    """Return the reference of the newest document of a type of frame."""
    return f"session.{type_}@{_NEWER.get(type_, '1.0.0')}"


def size_of(text: str | bytes) -> int:
    """Return the size of a frame's text in bytes of UTF-8."""
    return len(text) if isinstance(text, bytes) or text.isascii() else len(text.encode())


def known_announce(text: str | bytes, max_bytes: int, is_known: Callable[[bytes], bool]) -> Frame | None:
    """Return the announce in ``text`` unparsed, if ``is_known`` returns that its payload need not be parsed.

    Only in the spelling of ``Frame.encode``. Thousands of nodes send one a minute that differs from the one
    before in its times and its signature alone.
    """
    if isinstance(text, bytes) or len(text) > max_bytes or not text.isascii():
        return None
    found = _ENCODED_ANNOUNCE.match(text)
    if found is None or not text.endswith("}"):
        return None
    wire = text[found.end() : -1].encode("ascii")
    return Frame("announce", found[1], None, None, wire) if is_known(wire) else None


def begins_announce(beginning: bytes) -> bool:
    """Return whether a text that begins so is an announce in the spelling of ``Frame.encode``.

    A heartbeat follows it, and no one waits for either.
    """
    return beginning.startswith(b'{"type":"announce",')


def _payload_text(text: str | bytes) -> bytes:
    """Return the payload's text in that of an announce, which is strict JSON and fits its schema."""
    found = _ANNOUNCE.fullmatch(text if isinstance(text, str) else text.decode("utf-8"))
    if found is None:
        raise FrameError(FrameReason.ESCAPED_ANNOUNCE, "announce")
    return found[1].encode("utf-8")
