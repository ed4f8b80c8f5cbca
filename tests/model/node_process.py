"""A process of the node in the model: its own memory of commands and measure of delays, moved by hand.

Follows ``kubelet/session/link.py`` and ``kubelet/dispatch.py``. Must not check anything: the history does.
"""

from collections.abc import Callable, Mapping
from typing import Any

from schemas.delivery import AnswerCache, CommandStatus, TransitGauge
from schemas.frames import Frame, FrameReader, Role
from schemas.payloads import CmdAck
from tests.fakes.frames import ERROR, PAYLOADS
from tests.model.history import History
from tests.model.wire import End, Text, Wire

HANDLER_MS = 300
"""What the capability announces: less than some calls have, and more than others."""


class Process:
    """One process: it has one connection at most, and loses all it knows when it ends.

    Attributes:
        running: the commands that run: when they are stopped, by this process's clock, and their call.
        acknowledged: the ``msg_id`` and the answer that it gave last.
    """

    def __init__(  # noqa: PLR0913 - what comes in from outside
        self,
        *,
        reader: FrameReader,
        ticks_ms: Callable[[], int],
        new_id: Callable[[], str],
        history: History,
        memory: AnswerCache,
        gauge: Callable[[], TransitGauge],
    ) -> None:
        self._reader = reader
        self._ticks_ms = ticks_ms
        self._new_id = new_id
        self._history = history
        self._memory = memory
        self._new_gauge = gauge
        self._gauge = gauge()
        self.boot_id = new_id()
        self.session_id: str | None = None
        self.end: End | None = None
        self.running: dict[str, tuple[int, str]] = {}
        self.acknowledged: tuple[str, Mapping[str, Any]] | None = None

    def connect(self) -> Wire:
        """Open a connection."""
        wire = Wire(self.boot_id)
        self.end = End(Role.NODE, wire, self._reader)
        return wire

    def lose(self) -> None:
        """Take in that the connection is lost."""
        if self.end is not None:
            self.end.close()
            self.end = None

    def receive(self, text: str | None) -> None:
        """Take in what arrives; None for the end of the connection."""
        end = self.end
        if end is None:
            return
        if text is None:
            self.lose()
        elif (frame := end.receive(text)) is not None:
            self._handle(end, frame)

    def beat(self) -> None:
        """Send a heartbeat, if a session is open."""
        if self.end is not None and self.end.is_open:
            self.end.send("heartbeat", self._new_id(), PAYLOADS["heartbeat"])

    def finish(self, msg_id: str) -> None:
        """Let a command that runs come to its end."""
        _, correlation_id = self.running.pop(msg_id)
        self._reply(msg_id, {"ok": True, "result": {"of": correlation_id, "by": self.boot_id}})

    def expire(self) -> None:
        """End the commands whose handler has had its time."""
        now = self._ticks_ms()
        for msg_id, (ends_ms, correlation_id) in tuple(self.running.items()):
            if ends_ms <= now:
                del self.running[msg_id]
                self._reply(msg_id, _refusal("E_DEADLINE_EXCEEDED", correlation_id))

    def put(self, text: Text) -> None:
        """Send anything."""
        if self.end is not None and self.end.is_open:
            self.end.wire.put(Role.RELAY, text)

    def _handle(self, end: End, frame: Frame) -> None:
        payload = frame.payload
        match frame.type:
            case "challenge":
                auth = {**PAYLOADS["auth"], "boot_id": self.boot_id}
                if self.session_id is not None:
                    auth["resume"] = end.wire.resumes = self.session_id
                end.send("auth", self._new_id(), auth, frame.msg_id)
            case "welcome":
                self.session_id = payload["session_id"]
                if not payload["resumed"]:
                    self._gauge = self._new_gauge()
                self._gauge.delay_ms(payload["server_time_ms"], self._ticks_ms())
                self.beat()
            case "heartbeat_ack":
                self._gauge.renew(payload["server_time_ms"])
                self._gauge.delay_ms(payload["server_time_ms"], self._ticks_ms())
            case "cmd":
                delay = self._gauge.delay_ms(payload["sent_at_ms"], self._ticks_ms())
                self._submit(frame, payload["deadline_ms"] - delay)
            case "cmd_cancel":
                self._cancel(frame.in_reply_to or "")

    def _submit(self, frame: Frame, budget_ms: int) -> None:
        msg_id, correlation_id, now = frame.msg_id, frame.payload["correlation_id"], self._ticks_ms()
        status = self._memory.admit(msg_id, now + frame.payload["deadline_ms"], now)
        self._history.counts[f"{status.name.lower()} at the node"] += 1
        if status is CommandStatus.SEEN:
            if (answer := self._memory.recall(msg_id)) is not None:
                self._history.counts["answered from memory"] += 1
                self._send(msg_id, answer)
        elif status is CommandStatus.FORGOTTEN:
            self._send(msg_id, _refusal("E_DEADLINE_EXCEEDED", correlation_id))
        elif status is CommandStatus.FULL:
            self._send(msg_id, _refusal("E_RATE_LIMITED", correlation_id))
        elif budget_ms <= 0:
            self._history.counts["spent on the way"] += 1
            self._reply(msg_id, _refusal("E_DEADLINE_EXCEEDED", correlation_id))
        else:
            self._history.ran(msg_id, self.boot_id)
            self.running[msg_id] = now + min(budget_ms, HANDLER_MS), correlation_id

    def _cancel(self, msg_id: str) -> None:
        if (run := self.running.pop(msg_id, None)) is not None:
            self._memory.remember(msg_id, _refusal("E_DEADLINE_EXCEEDED", run[1]))

    def _reply(self, msg_id: str, answer: CmdAck) -> None:
        self._memory.remember(msg_id, answer)
        self._send(msg_id, answer)

    def _send(self, msg_id: str, answer: CmdAck) -> None:
        self.acknowledged = msg_id, answer
        if self.end is not None and self.end.is_open:
            self.end.send("cmd_ack", self._new_id(), answer, msg_id)


def _refusal(code: str, correlation_id: str) -> CmdAck:
    return {"ok": False, "error": {**ERROR, "code": code, "correlation_id": correlation_id}}
