"""At most once: what each end remembers of a command so that it never runs twice.

The relay keeps the commands that wait for an answer in a ``Ledger``, which outlives a connection; the node
keeps its answers in an ``AnswerMemory``, and a ``TransitGauge`` tells it how much of a deadline the way has
used up. Pure; times are milliseconds. Must not send anything.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

WaiterT = TypeVar("WaiterT")


@dataclass(slots=True)
class Sent(Generic[WaiterT]):
    """A command on its way: its payload, when it is over, and who waits for it."""

    payload: Mapping[str, Any]
    expires_at_ms: int
    waiter: WaiterT


class Ledger(Generic[WaiterT]):
    """The relay's book of unanswered commands of one session, by ``msg_id``."""

    def __init__(self) -> None:
        self._sent: dict[str, Sent[WaiterT]] = {}

    def __len__(self) -> int:
        return len(self._sent)

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._sent))

    def __contains__(self, msg_id: object) -> bool:
        return msg_id in self._sent

    def enter(self, msg_id: str, payload: Mapping[str, Any], expires_at_ms: int, waiter: WaiterT) -> None:
        """Note that the command was sent."""
        self._sent[msg_id] = Sent(payload, expires_at_ms, waiter)

    def settle(self, msg_id: str) -> WaiterT | None:
        """Return who waits for ``msg_id`` and strike it out; None the second time, and for a stranger."""
        sent = self._sent.pop(msg_id, None)
        return None if sent is None else sent.waiter

    def resendable(self, now_ms: int) -> list[tuple[str, dict[str, Any]]]:
        """Return ``(msg_id, payload)`` of what may be sent again to the same process, budgets renewed."""
        return [
            (msg_id, {**sent.payload, "deadline_ms": sent.expires_at_ms - now_ms, "sent_at_ms": now_ms})
            for msg_id, sent in self._sent.items()
            if sent.expires_at_ms > now_ms
        ]


class Admission(Enum):
    """What the node knows of a command that came in."""

    NEW = "new"
    SEEN = "seen"
    FULL = "full"


class AnswerMemory:
    """The node's memory of the commands that it has seen, at most ``capacity`` of them.

    The oldest answered one is forgotten first; one that still runs never is.
    """

    def __init__(self, capacity: int = 1024) -> None:
        self._capacity = capacity
        self._answers: dict[str, Mapping[str, Any] | None] = {}

    def admit(self, msg_id: str) -> Admission:
        """Remember ``msg_id`` as running if it is new and there is room, and tell which."""
        if msg_id in self._answers:
            return Admission.SEEN
        if len(self._answers) >= self._capacity:
            answered = next((key for key, answer in self._answers.items() if answer is not None), None)
            if answered is None:
                return Admission.FULL
            del self._answers[answered]
        self._answers[msg_id] = None
        return Admission.NEW

    def remember(self, msg_id: str, answer: Mapping[str, Any]) -> None:
        """Keep ``answer``, the payload of the ack to an admitted command, for when it comes again."""
        if msg_id in self._answers:
            self._answers[msg_id] = answer

    def recall(self, msg_id: str) -> Mapping[str, Any] | None:
        """Return the answer to ``msg_id``; None while it runs, or when it was never seen."""
        return self._answers.get(msg_id)


class TransitGauge:
    """How long a message was on its way, told by two clocks that need not agree.

    The smallest difference between the clocks stands for an instant journey; what a message shows beyond it
    is delay. Clocks drift and are set, so only what was seen since the last ``renew`` but one counts:
    otherwise a relay whose clock is set back would seem to move ever further away.
    """

    def __init__(self) -> None:
        self._current: int | None = None
        self._previous: int | None = None

    def renew(self) -> None:
        """Begin a new window: call it once a heartbeat."""
        self._previous, self._current = self._current, None

    def delay_ms(self, sent_at_ms: int, received_at_ms: int) -> int:
        """Return the delay of a message by the sender's and by our clock, and learn from it."""
        difference = received_at_ms - sent_at_ms
        self._current = difference if self._current is None else min(self._current, difference)
        known = self._current if self._previous is None else min(self._current, self._previous)
        return difference - known
