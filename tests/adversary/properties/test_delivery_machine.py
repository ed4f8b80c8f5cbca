"""A relay's pending, a node's memory, and a wire between them on which every message may be lost or doubled.

Whatever it does: a command runs at most once, its caller is answered at most once and with what its own run
gave, and what was sent again is the same command within its first deadline.
"""

from collections.abc import Mapping
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from schemas.delivery import ANSWER_BYTES, AnswerCache, CommandStatus, PendingCommands
from schemas.errors import Failure, ToolError
from schemas.payloads import Cmd, CmdAck
from tests.fakes.examples import examples
from tests.fakes.frames import COMMAND, message_id
from tests.fakes.signer import NOW_MS

CAPACITY = 4
ROOM_FOR_ANSWERS = 2 * ANSWER_BYTES + 80
DEADLINE_MS = 1000
PICK = st.integers(0, 30)

OVER: CmdAck = {"ok": False, "error": ToolError(Failure.DEADLINE_EXCEEDED).envelope()}


class DeliveryMachine(RuleBasedStateMachine):
    """One session of one process of a node, with whatever the wire does to it."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = NOW_MS
        self.pending: PendingCommands[str] = PendingCommands()
        self.memory = AnswerCache(CAPACITY, ROOM_FOR_ANSWERS)
        self.sent: dict[str, tuple[Cmd, int]] = {}
        self.to_node: list[tuple[str, Mapping[str, Any]]] = []
        self.to_relay: list[tuple[str, CmdAck]] = []
        self.running: list[str] = []
        self.runs: dict[str, int] = {}
        self.answers: dict[str, list[CmdAck]] = {}

    @rule()
    def call(self) -> None:
        """Send a command."""
        msg_id = message_id(len(self.sent))
        payload: Cmd = {
            **COMMAND,
            "tool": msg_id,
            "deadline_ms": DEADLINE_MS,
            "sent_at_ms": self.now_ms,
        }
        self.sent[msg_id] = payload, self.now_ms + DEADLINE_MS
        self.pending.add(msg_id, payload, self.now_ms + DEADLINE_MS, msg_id)
        self.to_node.append((msg_id, payload))

    @rule()
    def resume(self) -> None:
        """Come back after a lost connection: what is unanswered is sent again."""
        for msg_id in self.pending:
            if (payload := self.pending.renewed(msg_id, self.now_ms)) is None:
                continue
            first, over_ms = self.sent[msg_id]
            assert payload["tool"] == first["tool"]
            assert 0 < payload["deadline_ms"] == over_ms - self.now_ms
            assert not self.answers.get(msg_id)
            self.to_node.append((msg_id, payload))

    @rule(at=PICK, keep=st.booleans())
    def deliver(self, at: int, *, keep: bool) -> None:
        """Let a command arrive, perhaps not for the last time, and run if the node has not seen it."""
        if not self.to_node:
            return
        where = at % len(self.to_node)
        msg_id, payload = self.to_node[where] if keep else self.to_node.pop(where)
        match self.memory.admit(msg_id, self.now_ms + payload["deadline_ms"], self.now_ms):
            case CommandStatus.NEW:
                assert payload["tool"] == msg_id
                if self.now_ms - payload["sent_at_ms"] >= payload["deadline_ms"]:
                    # Spent on the way: it is refused unrun.
                    self.memory.remember(msg_id, OVER)
                    return
                self.running.append(msg_id)
                self.runs[msg_id] = self.runs.get(msg_id, 0) + 1
            case CommandStatus.SEEN:
                remembered = self.memory.recall(msg_id)
                assert (remembered is None) is (msg_id in self.running)
                if remembered is not None:
                    self.to_relay.append((msg_id, remembered))
            case CommandStatus.FORGOTTEN:
                assert msg_id not in self.running
            case CommandStatus.FULL:
                assert msg_id not in self.running

    @rule(at=PICK)
    def finish(self, at: int) -> None:
        """Let a command that runs come to its end."""
        if self.running:
            msg_id = self.running.pop(at % len(self.running))
            answer: CmdAck = {"ok": True, "result": {"of": msg_id, "run": self.runs[msg_id]}}
            self.memory.remember(msg_id, answer)
            self.to_relay.append((msg_id, answer))

    @rule(at=PICK, keep=st.booleans())
    def answer(self, at: int, *, keep: bool) -> None:
        """Let an answer arrive, perhaps not for the last time."""
        if self.to_relay:
            where = at % len(self.to_relay)
            self.settle(*(self.to_relay[where] if keep else self.to_relay.pop(where)))

    @rule(number=st.integers(0, 40))
    def forge(self, number: int) -> None:
        """Let an answer arrive to what may never have been sent."""
        if message_id(number) not in self.sent:
            assert self.pending.pop(message_id(number)) is None

    @rule(at=PICK, command=st.booleans())
    def lose(self, at: int, *, command: bool) -> None:
        """Drop something."""
        wire: list[Any] = self.to_node if command else self.to_relay
        if wire:
            wire.pop(at % len(wire))

    @rule(ms=st.integers(1, DEADLINE_MS))
    def wait(self, ms: int) -> None:
        """Let time pass."""
        self.now_ms += ms

    @rule()
    def give_up(self) -> None:
        """End the wait of each caller whose deadline has passed, with that error."""
        for msg_id in self.pending:
            if self.sent[msg_id][1] <= self.now_ms:
                self.settle(msg_id, OVER)

    def settle(self, msg_id: str, answer: CmdAck) -> None:
        waiter = self.pending.pop(msg_id)
        if waiter is not None:
            assert waiter == msg_id
            assert answer == OVER or (answer["ok"] and answer["result"]["of"] == msg_id)
            self.answers.setdefault(msg_id, []).append(answer)

    @invariant()
    def no_caller_is_answered_twice(self) -> None:
        """Neither by two answers, nor by an answer and the deadline."""
        assert all(len(answers) == 1 for answers in self.answers.values())
        assert not set(self.answers) & set(self.pending)

    @invariant()
    def nothing_runs_twice(self) -> None:
        """At most once, whatever the wire did and however little the node can remember."""
        assert set(self.runs.values()) <= {1}


TestDelivery = DeliveryMachine.TestCase
TestDelivery.settings = settings(examples(20, 120), stateful_step_count=50)
