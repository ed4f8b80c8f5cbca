"""The session between relay and node as a state machine without I/O, for both ends.

It turns texts into frames; one table defines what each end may send and receive in each state. A connection
starts in CHALLENGING and goes to AUTHENTICATING and OPEN:

    relay                     node
      challenge  ────────────▶          CHALLENGING
                 ◀────────────  auth    AUTHENTICATING
      welcome    ────────────▶          OPEN

Each answer is matched with its request here, so a late, duplicate, unknown or malformed answer never
reaches a caller: it is dropped and counted. Must not know sockets, clocks or trust.
"""

from collections.abc import Callable, Mapping
from enum import IntEnum, StrEnum
from types import MappingProxyType
from typing import Any

from schemas.error_roots import EdgeError, PeerError
from schemas.frames import (
    MAX_FRAME_BYTES,
    MAX_FRAME_BYTES_BEFORE_WELCOME,
    ONE_WAY,
    Frame,
    FrameBudgets,
    FrameError,
    FrameReader,
    FrameReason,
    OneWayType,
    Role,
    encoded,
    known_announce,
    size_of,
)


class SessionState(StrEnum):
    """The phase of the connection."""

    CHALLENGING = "challenging"
    AUTHENTICATING = "authenticating"
    OPEN = "open"
    CLOSED = "closed"


class DropReason(StrEnum):
    """Why a frame was dropped; the value is fit for a counter's label."""

    MALFORMED = "malformed"
    UNSOLICITED = "unasked"
    OVERSIZED = "oversized"
    OVER_RATE = "over_rate"


class ByeReason(StrEnum):
    """What ``bye`` gives as the reason of a close."""

    SHUTTING_DOWN = "shutting_down"
    SUPERSEDED = "superseded"
    MANIFEST_REJECTED = "manifest_rejected"
    REVOKED = "revoked"
    OVER_CAPACITY = "over_capacity"
    PROTOCOL_VIOLATION = "protocol_violation"
    AUTH_FAILED = "auth_failed"


class CancelReason(StrEnum):
    """Why ``cmd_cancel`` ends a command."""

    CALLER_GONE = "caller_gone"
    DEADLINE = "deadline"


class CloseCode(IntEnum):
    """WebSocket close codes of the session."""

    NORMAL = 1000
    GOING_AWAY = 1001
    AUTH_FAILED = 4001
    REVOKED = 4003
    SUPERSEDED = 4008
    PROTOCOL_VIOLATION = 4009
    MANIFEST_REJECTED = 4010
    OVER_CAPACITY = 4013


_MOST_UNANSWERED = 4096
"""More than can be in flight: the other end answers nothing, and the oldest are forgotten."""

_Moves = Mapping[str, SessionState]


def _in_open_session(sender: Role, *types: str) -> _Moves:
    """Return the moves of ``types`` and of the sender's one-way types, which leave the session open."""
    one_way = (type_.value for type_ in OneWayType if type_.sender is sender)
    return dict.fromkeys((*types, *one_way), SessionState.OPEN)


_RELAY_SENDS: Mapping[SessionState, _Moves] = {
    SessionState.CHALLENGING: {"challenge": SessionState.CHALLENGING},
    SessionState.AUTHENTICATING: {"welcome": SessionState.OPEN},
    SessionState.OPEN: _in_open_session(
        Role.RELAY, "announce_ack", "heartbeat_ack", "cmd", "cmd_cancel", "renew_ack", "retire_ack"
    ),
}
_NODE_SENDS: Mapping[SessionState, _Moves] = {
    SessionState.CHALLENGING: {"auth": SessionState.AUTHENTICATING},
    SessionState.AUTHENTICATING: {},
    SessionState.OPEN: _in_open_session(Role.NODE, "announce", "heartbeat", "cmd_ack", "renew", "retire"),
}
SENDS: Mapping[Role, Mapping[SessionState, _Moves]] = MappingProxyType(
    {Role.RELAY: _RELAY_SENDS, Role.NODE: _NODE_SENDS}
)
"""What each end may send in each state, and the state that it goes to. The other end may receive exactly
that; ``bye`` is allowed to both at any time and closes."""

ANSWERED_BY: Mapping[str, str] = MappingProxyType(
    {
        "challenge": "auth",
        "auth": "welcome",
        "announce": "announce_ack",
        "heartbeat": "heartbeat_ack",
        "cmd": "cmd_ack",
        "renew": "renew_ack",
        "retire": "retire_ack",
    }
)
_ANSWERS = MappingProxyType({answer: question for question, answer in ANSWERED_BY.items()})
_DROPS: Mapping[object, DropReason] = MappingProxyType(
    {FrameReason.OVERSIZED: DropReason.OVERSIZED, FrameReason.OVER_RATE: DropReason.OVER_RATE}
)


class ProtocolError(EdgeError):
    """A frame that may not be sent or received now; the connection is to be closed with ``code``."""

    code = CloseCode.PROTOCOL_VIOLATION

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class PeerProtocolError(ProtocolError, PeerError):
    """The other end sent that frame: it broke the protocol."""


class OverRateError(EdgeError):
    """A one-way frame that this end may not send yet: ``wait_s`` is the time until it may."""

    def __init__(self, wait_s: float) -> None:
        super().__init__("a frame over the rate of its type")
        self.wait_s = wait_s


class SessionMachine:
    """One end of one connection. ``seconds`` is a monotonic clock, for the rates of one-way frames.

    Attributes:
        state: how far the handshake is.
        dropped: how many frames were dropped, by reason.
        is_known: which payloads of an ``announce`` need not be parsed, as ``known_announce`` has it.
    """

    # A relay holds one for each of thousands of nodes.
    __slots__ = (
        "_budgets",
        "_max_frame_bytes",
        "_reader",
        "_receives",
        "_sends",
        "_unanswered",
        "dropped",
        "is_known",
        "state",
    )

    def __init__(
        self,
        role: Role,
        reader: FrameReader,
        seconds: Callable[[], float],
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self._sends = SENDS[role]
        self._receives = SENDS[Role.NODE if role is Role.RELAY else Role.RELAY]
        self._reader = reader
        self._budgets = FrameBudgets(role, seconds)
        self._max_frame_bytes = max_frame_bytes
        self._unanswered: dict[str, str] = {}
        self.state = SessionState.CHALLENGING
        self.dropped: dict[DropReason, int] = {}
        self.is_known: Callable[[bytes], bool] | None = None

    def send(
        self, type_: str, msg_id: str, payload: Mapping[str, Any] | bytes, in_reply_to: str | None = None
    ) -> str:
        """Return the text of a frame to send, and go to the state that sending it leads to.

        A ``payload`` of bytes is JSON, which was signed or is encoded, and goes into the frame as it is.

        Raises:
            ProtocolError: this end may not send it now, or it would be larger than a frame may be.
            OverRateError: it is a one-way frame beyond the rate of its type.
        """
        following = self._next(self._sends, type_)
        text = encoded(type_, msg_id, payload, in_reply_to)
        one_way = ONE_WAY.get(type_)
        limit = self._limit() if one_way is None else min(one_way.max_bytes, self._limit())
        if size_of(text) > limit:
            raise ProtocolError("a frame over the limit")
        if one_way is not None and (wait_s := self._budgets.take(one_way)) > 0:
            raise OverRateError(wait_s)
        self.state = following
        if type_ in ANSWERED_BY:
            self._unanswered[msg_id] = type_
            if len(self._unanswered) > _MOST_UNANSWERED:
                del self._unanswered[next(iter(self._unanswered))]
        return text

    def receive(self, text: str | bytes) -> Frame | None:
        """Return the frame that ``text`` holds, or None when it was dropped: an answer, or a one-way frame.

        Raises:
            PeerProtocolError: not a frame, or not one that the other end may send now.
        """
        try:
            frame = self._known(text) or self._reader.read(text, self._limit(), self._budgets.take)
        except FrameError as error:
            if self._is_droppable(error.type):
                self._drop(_DROPS.get(error.reason, DropReason.MALFORMED))
                return None
            raise PeerProtocolError(error.reason) from None
        following = self._next(self._receives, frame.type, PeerProtocolError)
        question = _ANSWERS.get(frame.type)
        if question is not None:
            asked = self._unanswered.get(frame.in_reply_to or "")
            if asked != question:
                if self.state is SessionState.OPEN:
                    self._drop(DropReason.UNSOLICITED)
                    return None
                raise PeerProtocolError("an answer to nothing that was asked")
            del self._unanswered[frame.in_reply_to or ""]
        self.state = following
        return frame

    def _known(self, text: str | bytes) -> Frame | None:
        if self.is_known is None or self.state is not SessionState.OPEN:
            return None
        return known_announce(text, self._limit(), self.is_known)

    def forget(self, msg_id: str) -> None:
        """Stop waiting for the answer to ``msg_id``: when it comes, it is late and dropped."""
        self._unanswered.pop(msg_id, None)

    def close(self) -> None:
        self.state = SessionState.CLOSED

    def _is_droppable(self, type_: str | None) -> bool:
        """Return whether a bad frame of ``type_`` is dropped, and does not end the session."""
        expendable = type_ == "cmd_ack" or type_ in ONE_WAY
        return expendable and type_ in self._receives.get(self.state, {})

    def _drop(self, reason: DropReason) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def _limit(self) -> int:
        return self._max_frame_bytes if self.state is SessionState.OPEN else MAX_FRAME_BYTES_BEFORE_WELCOME

    def _next(
        self, table: Mapping[SessionState, _Moves], type_: str, error: type[ProtocolError] = ProtocolError
    ) -> SessionState:
        if type_ == "bye" and self.state is not SessionState.CLOSED:
            return SessionState.CLOSED
        following = table.get(self.state, {}).get(type_)
        if following is None:
            raise error(f"{type_} does not belong in state {self.state.value}")
        return following
