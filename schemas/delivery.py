"""At most once: what each end remembers of a command so that it never runs twice.

The relay keeps the commands that wait for an answer in ``PendingCommands``, which outlives a connection. The
node keeps its answers in an ``AnswerCache``, and measures with a ``TransitGauge`` how much of a deadline was
spent in transit. Pure; times are milliseconds. Must not send anything.
"""

import json
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from schemas.payloads import Cmd, CmdAck

WaiterT = TypeVar("WaiterT")

CALL_BUDGET_MS = 5000
"""RFC-0005 section 7: of a call, end to end, as its caller sees it."""
DEFAULT_HANDLER_MS = 2000
"""RFC-0001 section 2: of a handler, where its capability announces no ``deadline_ms_default``."""
LONGEST_DEADLINE_MS = 30_000
"""Of a command, as its document has it."""
ENTRY_BYTES = 288
"""What a command takes in the memory besides its answer: 285 bytes at most, measured with CPython 3.11, when
many were forgotten and the dictionary has just grown."""

MAX_CACHE_BYTES = 1 << 20
"""What the memory of one node's commands takes."""

_NOT_KEPT = b""


@dataclass(slots=True)
class Sent(Generic[WaiterT]):
    """A command in flight: its payload, its deadline, and its waiter."""

    payload: Cmd
    expires_at_ms: int
    waiter: WaiterT


class PendingCommands(Generic[WaiterT]):
    """The commands of one session that the relay has sent and that have no answer yet, by ``msg_id``."""

    def __init__(self) -> None:
        self._sent: dict[str, Sent[WaiterT]] = {}

    def __len__(self) -> int:
        return len(self._sent)

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._sent))

    def add(self, msg_id: str, payload: Cmd, expires_at_ms: int, waiter: WaiterT) -> None:
        """Note that the command was sent."""
        self._sent[msg_id] = Sent(payload, expires_at_ms, waiter)

    def pop(self, msg_id: str) -> WaiterT | None:
        """Remove ``msg_id`` and return its waiter; None if it is unknown or was removed before."""
        sent = self._sent.pop(msg_id, None)
        return None if sent is None else sent.waiter

    def renewed(self, msg_id: str, now_ms: int) -> Cmd | None:
        """Return the payload with which ``msg_id`` may be sent again to the same process, its budget renewed.

        None if it has an answer, or no budget left.
        """
        sent = self._sent.get(msg_id)
        if sent is None or sent.expires_at_ms <= now_ms:
            return None
        return {**sent.payload, "deadline_ms": sent.expires_at_ms - now_ms, "sent_at_ms": now_ms}


class CommandStatus(Enum):
    """What the node knows of a command that came in."""

    NEW = "new"
    SEEN = "seen"
    FORGOTTEN = "seen, and its answer is not kept any more"
    FULL = "full"


@dataclass(slots=True)
class _Seen:
    """A command that the node knows; ``answer`` is None while it runs, and empty when it is not kept."""

    msg_id: str
    expires_at_ms: int
    answer: bytes | None = None


def _by_expiry(seen: _Seen) -> tuple[int, str]:
    return seen.expires_at_ms, seen.msg_id


class AnswerCache:
    """The node's memory of the commands that it has seen, in at most ``max_bytes``.

    A command is known while it runs and until its deadline: after that the relay does not send it again. Only
    answers are evicted before that, the one with the nearest deadline first; a repeat of such a command must
    be refused. To make room reads what makes room and a search in a sorted list, however many are known.
    """

    def __init__(self, max_bytes: int = MAX_CACHE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._used_bytes = 0
        self._seen: dict[str, _Seen] = {}
        # Those that have ended, by expiry: each in one of the two. One that runs cannot make room.
        self._answered: list[_Seen] = []
        self._answer_evicted: list[_Seen] = []

    def admit(self, msg_id: str, expires_at_ms: int, now_ms: int) -> CommandStatus:
        """Remember ``msg_id`` as running if it is new and fits, and return which."""
        if (seen := self._seen.get(msg_id)) is not None:
            return CommandStatus.FORGOTTEN if seen.answer == _NOT_KEPT else CommandStatus.SEEN
        if not self._make_room(ENTRY_BYTES, now_ms):
            return CommandStatus.FULL
        self._seen[msg_id] = _Seen(msg_id, expires_at_ms)
        self._used_bytes += ENTRY_BYTES
        return CommandStatus.NEW

    def remember(self, msg_id: str, answer: CmdAck, now_ms: int) -> None:
        """Keep ``answer``, the payload of the ack to an admitted command, for when it comes again.

        Raises:
            TypeError, ValueError: it is not JSON.
        """
        if (seen := self._seen.get(msg_id)) is None:
            return
        # As text: a small dictionary takes several times as much memory.
        text = json.dumps(answer, separators=(",", ":"), allow_nan=False).encode("ascii")
        if seen.answer is not None:
            # Out of the list until the new answer is set: it must not make room for itself.
            ended = self._list_of(seen)
            del ended[bisect_left(ended, _by_expiry(seen), key=_by_expiry)]
            self._used_bytes -= len(seen.answer)
        seen.answer = text if self._make_room(len(text), now_ms) else _NOT_KEPT
        self._used_bytes += len(seen.answer)
        insort(self._list_of(seen), seen, key=_by_expiry)

    def recall(self, msg_id: str) -> CmdAck | None:
        """Return the answer to ``msg_id``; None while there is none, or if it is not kept any more."""
        seen = self._seen.get(msg_id)
        if seen is None or not seen.answer:
            return None
        answer: CmdAck = json.loads(seen.answer)
        return answer

    def runs(self, msg_id: str) -> bool:
        """Return whether ``msg_id`` was admitted and has no answer yet."""
        return (seen := self._seen.get(msg_id)) is not None and seen.answer is None

    def _make_room(self, wanted_bytes: int, now_ms: int) -> bool:
        """Forget what is over, then the answers to what is not, until ``wanted_bytes`` are free."""
        while self._used_bytes + wanted_bytes > self._max_bytes:
            if not (
                self._forget_first(self._answer_evicted, now_ms)
                or self._forget_first(self._answered, now_ms)
                or self._evict_first()
            ):
                return False
        return True

    def _forget_first(self, ended: list[_Seen], now_ms: int) -> bool:
        """Forget the first of ``ended`` if it is over; return whether it was."""
        if not ended or ended[0].expires_at_ms > now_ms:
            return False
        over = ended.pop(0)
        del self._seen[over.msg_id]
        self._used_bytes -= ENTRY_BYTES + len(over.answer or b"")
        return True

    def _evict_first(self) -> bool:
        """Evict the first answer that is kept; return whether there was one."""
        if not self._answered:
            return False
        seen = self._answered.pop(0)
        self._used_bytes -= len(seen.answer or b"")
        seen.answer = _NOT_KEPT
        insort(self._answer_evicted, seen, key=_by_expiry)
        return True

    def _list_of(self, seen: _Seen) -> list[_Seen]:
        """Return the list in which a command that has ended is."""
        return self._answered if seen.answer else self._answer_evicted


class TransitGauge:
    """How long a message was on its way, measured by two clocks that need not agree.

    The smallest difference between the clocks counts as no delay; what a message shows beyond it is delay.
    Clocks drift and are set, so only what was seen in this window and the one before counts: otherwise every
    message would seem delayed once the sender's clock is set back. A window is no shorter than a command may
    live. When a command is sent again, the delay of the first time therefore still counts: once its deadline
    has passed and the ``AnswerCache`` has forgotten it, it is seen to be late, and does not run again.
    """

    def __init__(self) -> None:
        self._current: int | None = None
        self._previous: int | None = None
        self._began_ms: int | None = None

    def renew(self, sent_at_ms: int) -> None:
        """Begin a new window with a message, unless the last one began less than a deadline before it.

        ``sent_at_ms`` is by the sender's clock. Call it once a heartbeat.
        """
        if self._began_ms is not None and abs(sent_at_ms - self._began_ms) < LONGEST_DEADLINE_MS:
            return
        self._began_ms = sent_at_ms
        self._previous, self._current = self._current, None

    def delay_ms(self, sent_at_ms: int, received_at_ms: int) -> int:
        """Return the delay of a message by the sender's and the receiver's clock, and update the window."""
        difference = received_at_ms - sent_at_ms
        self._current = difference if self._current is None else min(self._current, difference)
        known = self._current if self._previous is None else min(self._current, self._previous)
        return difference - known
