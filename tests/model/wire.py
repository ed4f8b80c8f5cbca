"""One connection between the two ends, and one end of it: ordered both ways, until it is cut.

What is in flight at a cut is lost, and each end learns of the cut by itself, later or never. Must not know
what a frame is for.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from schemas.frames import Frame, FrameReader, Role
from schemas.session import SENDS, PeerProtocolError, SessionMachine, SessionState
from tests.model.history import ViolationError


@dataclass(frozen=True, slots=True)
class Text:
    """A frame in flight; ``is_forged`` if the relay must drop and count it. ``text`` is None for a close."""

    text: str | None
    is_forged: bool = False


@dataclass(slots=True, eq=False)
class Wire:
    """What is in flight on one connection, by the end that it goes to.

    ``boot_id`` is the node's process; ``resumes`` is the session that it has named.
    """

    boot_id: str
    resumes: str | None = None
    is_whole: bool = True
    in_flight: dict[Role, deque[Text]] = field(default_factory=lambda: {role: deque() for role in Role})

    def put(self, to: Role, text: Text) -> None:
        """Send, unless the wire is cut: then it is lost, and the sender does not know."""
        if self.is_whole:
            self.in_flight[to].append(text)

    def cut(self) -> None:
        """Lose what is in flight, and whatever is sent from now on."""
        self.is_whole = False
        for texts in self.in_flight.values():
            texts.clear()


class End:
    """One end of a wire: the protocol machine, with its moves checked against the table of transitions."""

    def __init__(self, role: Role, wire: Wire, reader: FrameReader) -> None:
        self.wire = wire
        self.machine = SessionMachine(role, reader, lambda: 0.0)
        self._role = role
        self._other = Role.NODE if role is Role.RELAY else Role.RELAY

    @property
    def is_open(self) -> bool:
        """Whether the handshake is done, and this end knows of no close."""
        return self.machine.state is SessionState.OPEN

    @property
    def dropped(self) -> int:
        """How many frames were dropped and counted."""
        return sum(self.machine.dropped.values())

    def send(
        self, type_: str, msg_id: str, payload: Mapping[str, Any], in_reply_to: str | None = None
    ) -> None:
        before = self.machine.state
        text = self.machine.send(type_, msg_id, payload, in_reply_to)
        self._moved(self._role, type_, before)
        self.wire.put(self._other, Text(text))

    def receive(self, text: str) -> Frame | None:
        """Return the frame; None if it is dropped, or this end has closed. Two honest ends never disagree."""
        before = self.machine.state
        if before is SessionState.CLOSED:
            return None
        try:
            frame = self.machine.receive(text)
        except PeerProtocolError as error:
            raise ViolationError(f"an honest end broke the protocol: {error.reason}") from error
        if frame is not None:
            self._moved(self._other, frame.type, before)
        return frame

    def close(self, *, says: str | None = None, msg_id: str = "") -> None:
        """Close, after a ``bye`` with the reason ``says``."""
        if self.machine.state is SessionState.CLOSED:
            return
        if says is not None:
            self.send("bye", msg_id, {"reason": says})
        self.machine.close()
        self.wire.put(self._other, Text(None))

    def _moved(self, sender: Role, type_: str, before: SessionState) -> None:
        legal = SessionState.CLOSED if type_ == "bye" else SENDS[sender].get(before, {}).get(type_)
        if self.machine.state is not legal:
            raise ViolationError(f"{type_} moved an end from {before} to {self.machine.state}")
