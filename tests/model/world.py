"""The model of delivery: a relay, a node, a clone of its identity, and connections that may be cut.

Both ends are made of the parts that the programs use: the protocol machine with its documents, the relay's
session, the pending commands, the node's memory and its measure of delays. ``World.step`` makes one choice
of what happens next, and the history checks every property that it concerns. Pure: time is a number, and the
choices are the only chance, so that the same choices always make the same world.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

from relay.routing.port import CommandAnswer
from relay.sessions.session import NodeSession
from schemas.delivery import ANSWER_BYTES, AnswerCache, PendingCommands, TransitGauge
from schemas.frames import FrameReader, Role
from tests.fakes.frames import message_id
from tests.fakes.signer import NOW_MS
from tests.model.choices import Action, Choice
from tests.model.history import History, Recipient, ViolationError
from tests.model.node_process import Process
from tests.model.relay_end import RelayConnection, RelayEnd
from tests.model.wire import Text, Wire

DEADLINES_MS = (40, 150, 400, 2000)
STEPS_MS = (1, 3, 7, 20, 50, 300, 2000, 40_000)
MOST_CALLS = 6
_COMMANDS = 4
_ANSWER_BYTES = ANSWER_BYTES + 300
"""For four commands and one answer: each limit is reached often."""
_CLOCK_AHEAD_MS = 7_777_777
_CLONE_CONNECTS = 40
"""One attempt to connect in so many is the clone's."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts under test. A test of the checks themselves replaces one by a part that errs."""

    relay: type[RelayEnd] = RelayEnd
    session: Callable[..., NodeSession] = NodeSession
    pending: Callable[[], PendingCommands[CommandAnswer]] = PendingCommands
    memory: Callable[[int, int], AnswerCache] = AnswerCache
    gauge: Callable[[], TransitGauge] = TransitGauge


class World:
    """Everything at one moment."""

    def __init__(self, reader: FrameReader, parts: Parts | None = None) -> None:
        self.history = History()
        self._reader = reader
        self._parts = parts or Parts()
        # Its futures are used, and it never runs.
        self._loop = asyncio.new_event_loop()
        self._ids = (message_id(number) for number in count(1))
        self._now_ms = NOW_MS
        self._relay = self._new_relay()
        self._node, self._clone = self._new_process(), self._new_process()
        self._actions: dict[Action, Callable[[int], None]] = {
            Action.CALL: self._call,
            Action.CANCEL: self._cancel,
            Action.TO_NODE: self._to_node,
            Action.TO_RELAY: self._to_relay,
            Action.SEND_AGAIN: self._send_again,
            Action.FINISH: self._finish,
            Action.WAIT: lambda pick: self._wait(STEPS_MS[pick % len(STEPS_MS)]),
            Action.CONNECT: self._connect,
            Action.HEARTBEAT: lambda _: self._node.beat(),
            Action.CUT: self._cut,
            Action.NODE_NOTICES: self._node_notices,
            Action.RELAY_NOTICES: self._relay_notices,
            Action.FORGE: self._forge,
            Action.NODE_CRASHES: lambda _: self._node_crashes(),
            Action.RELAY_CRASHES: lambda _: self._relay_crashes(),
            Action.SHUT_OUT: lambda _: self._relay.shut_out(),
            Action.COME_TO_REST: lambda _: self._come_to_rest(),
        }

    def step(self, choice: Choice) -> None:
        """Let ``choice`` happen, if it can now.

        Raises:
            ViolationError: a property does not hold.
        """
        self._actions[choice.action](choice.pick)
        self.history.check(self._now_ms)

    def finish(self) -> None:
        """Let every deadline pass, so that each call has its outcome."""
        self._wait(max(DEADLINES_MS))
        self.history.check(self._now_ms)

    def close(self) -> None:
        """Release the loop."""
        self._loop.close()

    @property
    def _processes(self) -> tuple[Process, Process]:
        return self._node, self._clone

    def _time(self) -> Any:
        return self._now_ms

    def _new_id(self) -> str:
        return next(self._ids)

    def _new_relay(self) -> RelayEnd:
        return self._parts.relay(
            loop=self._loop,
            reader=self._reader,
            now_ms=self._time,
            new_id=self._new_id,
            history=self.history,
            sessions=self._parts.session,
            pending=self._parts.pending,
        )

    def _new_process(self) -> Process:
        return Process(
            reader=self._reader,
            ticks_ms=lambda: self._now_ms + _CLOCK_AHEAD_MS,
            new_id=self._new_id,
            history=self.history,
            memory=self._parts.memory(_COMMANDS, _ANSWER_BYTES),
            gauge=self._parts.gauge,
        )

    def _call(self, pick: int) -> None:
        if len(self.history.live) < MOST_CALLS:
            deadline_ms = DEADLINES_MS[pick % len(DEADLINES_MS)]
            self._relay.call(self.history.began(self._new_id(), self._now_ms + deadline_ms))

    def _cancel(self, pick: int) -> None:
        if waiting := tuple(self._relay.waiting):
            self._relay.give_up(waiting[pick % len(waiting)])

    def _to_node(self, pick: int) -> None:
        process = self._processes[pick % 2]
        if process.end is not None and (texts := process.end.wire.in_flight[Role.NODE]):
            process.receive(texts.popleft().text)

    def _to_relay(self, pick: int) -> None:
        # A connection is not read while what is sent again waits for the node to read.
        ready = [
            connection
            for connection in self._relay.connections
            if connection.end.wire.in_flight[Role.RELAY] and not connection.again
        ]
        if ready:
            connection = ready[pick % len(ready)]
            self._arrive(connection, connection.end.wire.in_flight[Role.RELAY].popleft())

    def _arrive(self, connection: RelayConnection, text: Text) -> None:
        ended, dropped = len(self.history.live), connection.end.dropped
        is_read = connection.is_open
        self._relay.receive(connection, text.text)
        if text.is_forged and is_read:
            self.history.counts["forged"] += 1
            if len(self.history.live) != ended or connection.end.dropped != dropped + 1:
                raise ViolationError("an answer that must not count was not dropped and counted")

    def _send_again(self, pick: int) -> None:
        ready = [connection for connection in self._relay.connections if connection.again]
        if ready:
            self._relay.send_again(ready[pick % len(ready)])

    def _finish(self, pick: int) -> None:
        running = [(process, msg_id) for process in self._processes for msg_id in process.running]
        if running:
            process, msg_id = running[pick % len(running)]
            process.finish(msg_id)

    def _wait(self, ms: int) -> None:
        """Let time pass, from one deadline to the next."""
        ends_ms = self._now_ms + ms
        while True:
            expiries = [waiting.call.expires_at_ms for waiting in self._relay.waiting.values()]
            self._now_ms = min([ends_ms, *(expires for expires in expiries if expires > self._now_ms)])
            for process in self._processes:
                process.expire()
            for msg_id, waiting in tuple(self._relay.waiting.items()):
                if waiting.call.expires_at_ms == self._now_ms:
                    self._relay.expire(msg_id)
            if self._now_ms == ends_ms:
                return

    def _connect(self, pick: int) -> None:
        process = self._clone if pick % _CLONE_CONNECTS == 0 else self._node
        if process.end is None:
            self._relay.accept(process.connect())

    def _cut(self, pick: int) -> None:
        whole = [wire for wire in self._wires() if wire.is_whole]
        if whole:
            whole[pick % len(whole)].cut()

    def _node_notices(self, pick: int) -> None:
        process = self._processes[pick % 2]
        if process.end is not None and not process.end.wire.is_whole:
            process.lose()

    def _relay_notices(self, pick: int) -> None:
        lost = [connection for connection in self._relay.connections if not connection.end.wire.is_whole]
        if lost:
            self._relay.lose(lost[pick % len(lost)])

    def _forge(self, pick: int) -> None:
        """Send an answer that must not count: a malformed one, a doubled one, or one to another's command."""
        process = self._processes[pick % 2]
        kind, live = pick // 2 % 3, list(self.history.live.values())
        foreign = [
            call.msg_id
            for call in live
            if call.sent_to not in {None, Recipient(process.session_id or "", process.boot_id)}
        ]
        if kind == 0 and live:
            msg_id = live[pick % len(live)].msg_id or self._new_id()
            process.put(Text(_ack(self._new_id(), msg_id, ok="nonsense"), is_forged=True))
        elif kind == 1 and process.acknowledged is not None:
            msg_id, _ = process.acknowledged
            if self.history.by_msg_id[msg_id].outcome is not None:
                process.put(Text(_ack(self._new_id(), msg_id, ok=True), is_forged=True))
        elif foreign:
            process.put(Text(_ack(self._new_id(), foreign[pick % len(foreign)], ok=True), is_forged=True))

    def _node_crashes(self) -> None:
        if self._node.end is not None:
            self._node.end.wire.cut()
        self._node = self._new_process()

    def _relay_crashes(self) -> None:
        self._relay.crash()
        self._relay = self._new_relay()

    def _come_to_rest(self) -> None:
        """Let the node connect, and let everything arrive and end, without time: then nothing is owed."""
        for process in self._processes:
            if process.end is not None and (process is self._clone or not process.end.wire.is_whole):
                process.end.wire.cut()
                process.lose()
        for connection in tuple(self._relay.connections):
            if not connection.end.wire.is_whole:
                self._relay.lose(connection)
        while self._moves():
            pass
        session = self._relay.session
        owing = Recipient(session.session_id, session.boot_id) if session is not None else None
        self.history.nothing_is_owed(owing)
        self.history.counts["at rest"] += 1

    def _moves(self) -> bool:
        """Do what is to be done; return whether there was anything."""
        if self._node.end is None:
            self._relay.accept(self._node.connect())
            return True
        if self._node.end.wire.in_flight[Role.NODE]:
            self._to_node(0)
            return True
        for connection in self._relay.connections:
            if connection.again:
                self._relay.send_again(connection)
                return True
            if texts := connection.end.wire.in_flight[Role.RELAY]:
                self._arrive(connection, texts.popleft())
                return True
        if self._node.running:
            self._node.finish(next(iter(self._node.running)))
            return True
        return False

    def _wires(self) -> list[Wire]:
        return [connection.end.wire for connection in self._relay.connections]


def _ack(msg_id: str, in_reply_to: str, *, ok: object) -> str:
    result = {"of": in_reply_to, "by": msg_id}
    payload = {"ok": ok, "result": result}
    return json.dumps(
        {"type": "cmd_ack", "msg_id": msg_id, "in_reply_to": in_reply_to, "payload": payload},
        separators=(",", ":"),
    )
