"""A relay's book, a node's memory, and a wire between them on which every message may be lost or doubled.

Whatever it does: a command runs at most once, its caller is answered at most once and with what its own run
gave, and what was sent again is the same command within its first deadline.
"""

from collections.abc import Mapping
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from schemas.delivery import Admission, AnswerMemory, Ledger
from tests.fakes.examples import examples
from tests.fakes.signer import NOW_MS

CAPACITY = 4
DEADLINE_MS = 100
PICK = st.integers(0, 30)


class DeliveryMachine(RuleBasedStateMachine):
    """One session of one process of a node, with whatever the wire does to it."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = NOW_MS
        self.book: Ledger[str] = Ledger()
        self.memory = AnswerMemory(CAPACITY)
        self.sent: dict[str, tuple[dict[str, Any], int]] = {}
        self.to_node: list[tuple[str, Mapping[str, Any]]] = []
        self.to_relay: list[tuple[str, Mapping[str, Any]]] = []
        self.running: list[str] = []
        self.runs: dict[str, int] = {}
        self.answers: dict[str, list[Mapping[str, Any]]] = {}

    @rule()
    def call(self) -> None:
        """Send a command."""
        msg_id = f"m{len(self.sent)}"
        payload = {"tool": msg_id, "deadline_ms": DEADLINE_MS, "sent_at_ms": self.now_ms}
        self.sent[msg_id] = payload, self.now_ms + DEADLINE_MS
        self.book.enter(msg_id, payload, self.now_ms + DEADLINE_MS, msg_id)
        self.to_node.append((msg_id, payload))

    @rule()
    def resume(self) -> None:
        """Come back after a lost connection: what is unanswered is sent again."""
        for msg_id, payload in self.book.resendable(self.now_ms):
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
        match self.memory.admit(msg_id):
            case Admission.NEW:
                assert payload["tool"] == msg_id
                self.running.append(msg_id)
                self.runs[msg_id] = self.runs.get(msg_id, 0) + 1
            case Admission.SEEN:
                remembered = self.memory.recall(msg_id)
                assert (remembered is None) is (msg_id in self.running)
                if remembered is not None:
                    self.to_relay.append((msg_id, remembered))
            case Admission.FULL:
                assert len(self.running) >= CAPACITY

    @rule(at=PICK)
    def finish(self, at: int) -> None:
        """Let a command that runs come to its end."""
        if self.running:
            msg_id = self.running.pop(at % len(self.running))
            answer = {"ok": True, "result": {"of": msg_id, "run": self.runs[msg_id]}}
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
        if f"m{number}" not in self.sent:
            assert self.book.settle(f"m{number}") is None

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
        """Let those who have waited too long be told so, and wait no more."""
        for msg_id in self.book:
            if self.sent[msg_id][1] <= self.now_ms:
                self.settle(msg_id, {"ok": False})

    def settle(self, msg_id: str, answer: Mapping[str, Any]) -> None:
        waiter = self.book.settle(msg_id)
        if waiter is not None:
            assert waiter == msg_id
            assert answer == {"ok": False} or answer["result"]["of"] == msg_id
            self.answers.setdefault(msg_id, []).append(answer)

    @invariant()
    def nobody_is_answered_twice(self) -> None:
        """Neither by two answers, nor by an answer and the deadline."""
        assert all(len(answers) == 1 for answers in self.answers.values())
        assert not set(self.answers) & set(self.book)

    @invariant()
    def nothing_runs_twice_within_the_memory(self) -> None:
        """Not while the node remembers it, and it remembers whatever runs."""
        for msg_id, runs in self.runs.items():
            assert runs == 1 or len(self.runs) > CAPACITY
            assert self.running.count(msg_id) <= 1


class WithinMemory(DeliveryMachine):
    """The same with no more commands than the node remembers, so that the promise is whole."""

    @rule()
    def call(self) -> None:
        """Send a command if the node would remember it."""
        if len(self.sent) < CAPACITY:
            super().call()

    @invariant()
    def nothing_runs_twice(self) -> None:
        """At most once, whatever the wire did."""
        assert set(self.runs.values()) <= {1}


SETTINGS = settings(examples(20, 60), stateful_step_count=50)
TestDelivery = DeliveryMachine.TestCase
TestDelivery.settings = SETTINGS
TestDeliveryWithinMemory = WithinMemory.TestCase
TestDeliveryWithinMemory.settings = SETTINGS
