"""A node's session, which outlives its connections, and a connection: a socket and the machine of its frames.

Must not act on frames.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NewType

from relay.http.websocket_protocol import BoundedWebSocket, FrameMeter, SocketClosedError
from relay.observability.ascii_json import encoded
from relay.routing.port import CommandAnswer
from schemas.delivery import PendingCommands
from schemas.errors import ToolError
from schemas.frames import Frame, agreed, begins_announce, includes
from schemas.identity import Identity
from schemas.payloads import Bye, CmdAck, Welcome
from schemas.session import ByeReason, CloseCode, DropReason, PeerProtocolError, SessionMachine, SessionState
from schemas.ulids import UlidSource

_BYE_REASONS = {
    CloseCode.SUPERSEDED: ByeReason.SUPERSEDED,
    CloseCode.MANIFEST_REJECTED: ByeReason.MANIFEST_REJECTED,
    CloseCode.REVOKED: ByeReason.REVOKED,
    CloseCode.OVER_CAPACITY: ByeReason.OVER_CAPACITY,
}


@dataclass(frozen=True, slots=True)
class _Received:
    """A text that was read as it arrived, for ``receive``: its frame, or how the node broke the protocol."""

    frame: Frame | None = None
    error: PeerProtocolError | None = None


class NodeConnection:
    """One connection: a socket and the protocol machine.

    Sending and receiving raise ``SocketClosedError`` once either end has closed.
    """

    __slots__ = ("_handle", "_is_welcomed", "_machine", "_socket", "_subprotocol", "_ulids")

    def __init__(self, socket: BoundedWebSocket, machine: SessionMachine, ulids: UlidSource) -> None:
        self._socket = socket
        self._subprotocol = agreed(socket.subprotocols)
        self._machine = machine
        self._ulids = ulids
        self._is_welcomed = False
        self._handle: Callable[[NodeConnection, Frame], bool] = lambda *_: False
        socket.handle_texts(self._read, begins_announce)

    @property
    def peer(self) -> str:
        return self._socket.address

    @property
    def meter(self) -> FrameMeter:
        return self._socket.meter

    def speaks(self, version: str) -> bool:
        """Return whether the node speaks the subprotocol ``version``, or a newer one that both know."""
        return includes(self._subprotocol, version)

    @property
    def is_open(self) -> bool:
        """Whether the welcome was written and neither end has closed."""
        return self._is_welcomed and self._machine.state is SessionState.OPEN

    @property
    def is_closed(self) -> bool:
        return self._machine.state is SessionState.CLOSED

    async def welcome(self, payload: Welcome, auth_id: str) -> None:
        """Answer the ``auth`` with that id. Open once it is written: nothing may overtake it."""
        await self.send("welcome", payload, auth_id)
        self._is_welcomed = True

    async def send(self, type_: str, payload: Mapping[str, Any], in_reply_to: str | None = None) -> str:
        """Send a frame and return its ``msg_id``."""
        msg_id = self._ulids.new()
        await self.send_text(self.encoded(type_, payload, msg_id, in_reply_to))
        return msg_id

    def encoded(
        self,
        type_: str,
        payload: Mapping[str, Any],
        msg_id: str | None = None,
        in_reply_to: str | None = None,
    ) -> str:
        """Return the text of a frame for ``send_text``, with a fresh ``msg_id`` unless it has one.

        Raises:
            ProtocolError, OverRateError: as ``SessionMachine.send``.
        """
        # The standard encoder, by which the machine would encode it, takes four times as long.
        wire = encoded(payload).encode("ascii")
        return self._machine.send(type_, msg_id or self._ulids.new(), wire, in_reply_to)

    async def send_text(self, text: str) -> None:
        await self._socket.send(text)

    @property
    def can_send_now(self) -> bool:
        """Whether ``send_now`` has an effect: the connection is open, and the node reads."""
        return self.is_open and self._socket.can_send_now

    def send_now(self, text: str, *, is_whole: bool = False) -> bool:
        """Send a frame that is encoded, as ``BoundedWebSocket.send_now`` does."""
        return self._socket.send_now(text, is_whole=is_whole)

    def handle_frames(self, handle: "Callable[[NodeConnection, Frame], bool]") -> None:
        """Call ``handle`` with this connection and each frame as it arrives, while ``receive`` waits.

        ``receive`` returns only those for which it returns False. ``handle`` must not refer to the
        connection: what a lost one holds would wait for the garbage collector, minutes later.
        """
        self._handle = handle

    def _read(self, text: str) -> _Received | None:
        try:
            frame = self._machine.receive(text)
        except PeerProtocolError as error:
            return _Received(error=error)
        return None if frame is not None and self._handle(self, frame) else _Received(frame)

    async def receive(self) -> Frame | None:
        """Return the next frame; None if it is dropped."""
        received = await self._socket.receive()
        if not isinstance(received, _Received):
            raise PeerProtocolError("a binary frame")
        if received.error is not None:
            raise received.error
        return received.frame

    def know_announces(self, is_known: Callable[[bytes], bool]) -> None:
        """Do not parse the payload of an ``announce`` of which ``is_known`` returns that it need not be."""
        self._machine.is_known = is_known

    def forget(self, msg_id: str) -> None:
        self._machine.forget(msg_id)

    def take_dropped(self) -> dict[DropReason, int]:
        """Return how many frames were dropped since the last call, by reason."""
        dropped = dict(self._machine.dropped)
        self._machine.dropped.clear()
        return dropped

    async def close(self, code: CloseCode, retry_after_ms: int | None = None) -> None:
        """Send ``bye`` where the code has a reason for it, with the retry time, and close."""
        try:
            if code in _BYE_REASONS and self._machine.state is not SessionState.CLOSED:
                bye: Bye = {"reason": _BYE_REASONS[code]}
                if retry_after_ms is not None:
                    bye["retry_after_ms"] = retry_after_ms
                await self.send("bye", bye)
            self._machine.close()
            await self._socket.close(code)
        except SocketClosedError:
            self._machine.close()  # the other end closed first


SessionMs = NewType("SessionMs", int)
"""A moment by a ``SessionClock``."""


class SessionClock:
    """The time at which a session began, and ticks since.

    The node measures by it how long a command was in transit: a step would look like a delay, and every later
    command would look late.
    """

    def __init__(self, began_ms: int, ticks_ms: Callable[[], int]) -> None:
        self._ticks_ms = ticks_ms
        self._offset = began_ms - ticks_ms()

    def __call__(self) -> SessionMs:
        return SessionMs(self._offset + self._ticks_ms())


@dataclass(slots=True)
class NodeSession:
    """A session. ``connection`` is None while it is lost.

    Attributes:
        now_ms: the session's time, by which the node measures delays; it continues when it is resumed.
        identity: the leaf that the node proved last, in the handshake or with a manifest.
        heartbeat_interval_ms: what the node was last asked for.
        ca_requests: the types of the frames that wait for the certificate authority, one of each at a time.
        is_retiring: whether the node retires: it gets the acknowledgement before its connection is closed.
    """

    session_id: str
    boot_id: str
    identity: Identity
    connection: NodeConnection | None
    now_ms: SessionClock
    pending: PendingCommands[CommandAnswer] = field(default_factory=PendingCommands)
    rejected_in_a_row: int = 0
    heartbeat_interval_ms: int = 0
    ca_requests: set[str] = field(default_factory=set)
    is_retiring: bool = False

    def is_resumed_by(self, boot_id: str, resume: str | None) -> bool:
        """Return whether the process ``boot_id`` resumes this session: the same process, which names it."""
        return self.boot_id == boot_id and self.session_id == resume

    def settle(self, msg_id: str, answer: CmdAck) -> None:
        waiter = self.pending.pop(msg_id)
        if waiter is not None and not waiter.done():
            waiter.set_result(answer)

    def fail_all(self, error: ToolError) -> None:
        for msg_id in self.pending:
            waiter = self.pending.pop(msg_id)
            if waiter is not None and not waiter.done():
                waiter.set_exception(error)
