"""At most once: what each end remembers of a command so that it never runs twice.

The relay keeps the commands that wait for an answer in ``PendingCommands``, which outlives a connection. The
node keeps its answers in an ``AnswerCache``, and measures with a ``TransitGauge`` how much of a deadline was
spent in transit. Pure; times are milliseconds. Must not send anything.
"""

import json
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from math import ceil
from typing import Generic, TypeVar

from schemas.payloads import Cmd, CmdAck

WaiterT = TypeVar("WaiterT")

CALL_BUDGET_MS = 5000
"""RFC-0005 section 7: of a call, end to end, as its caller sees it."""
DEFAULT_HANDLER_MS = 2000
"""RFC-0001 section 2: of a handler, where its capability announces no ``deadline_ms_default``."""
LONGEST_DEADLINE_MS = 30_000
"""Of a command, as its document has it."""

_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
_ID_BYTES = 26
COMMAND_BYTES = 32
"""What a node's memory takes for a command that it knows: 26 bytes of its id, and the room to grow."""
FEWEST_COMMANDS = (1 << 17) // COMMAND_BYTES
"""So many commands a node knows at once, in 128 KiB, however few it announces."""
_KNOWN_S = 8
"""For how long it has to know what it announces: the time of a call, the rest of the second in which that
ends, and a burst of a second of each relay when the node goes from one to another."""
MOST_COMMANDS_PER_S = (4 << 20) // (COMMAND_BYTES * _KNOWN_S)
"""So many commands the capabilities of one node may announce together: known, they take 4 MiB."""

MAX_ANSWER_BYTES = 1 << 20
"""What the answers in the memory of one node take."""
ANSWER_BYTES = 288
"""What an answer takes besides its text."""


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


def commands_to_know(commands_per_s: float) -> int:
    """Return how many commands a node has to know at once that announces so many a second."""
    return max(FEWEST_COMMANDS, _KNOWN_S * ceil(min(commands_per_s, MOST_COMMANDS_PER_S)))


class CommandStatus(Enum):
    """What the node knows of a command that came in."""

    NEW = "new"
    SEEN = "seen"
    FORGOTTEN = "seen, and its answer is not kept any more"
    FULL = "full"


class _CommandIds:
    """A set of commands' ids, of 26 characters each, sorted in one run of bytes.

    A relay's ids ascend, so that most are added at the end, and are seen to be new by the last one.
    """

    __slots__ = ("_last", "_packed")

    def __init__(self) -> None:
        self._packed = bytearray()
        self._last = b""

    def __len__(self) -> int:
        return len(self._packed) // _ID_BYTES

    def __contains__(self, msg_id: bytes) -> bool:
        if msg_id > self._last:
            return False
        at = self._place_of(msg_id)
        return self._packed[at : at + _ID_BYTES] == msg_id

    def add(self, msg_id: bytes) -> None:
        if msg_id > self._last:
            self._packed += msg_id
            self._last = msg_id
        else:
            at = self._place_of(msg_id)
            self._packed[at:at] = msg_id

    def _place_of(self, msg_id: bytes) -> int:
        """Return where ``msg_id`` is, or where it belongs."""

        def at(number: int) -> bytes:
            return bytes(self._packed[number * _ID_BYTES : (number + 1) * _ID_BYTES])

        return bisect_left(range(len(self)), msg_id, key=at) * _ID_BYTES


class AnswerCache:
    """The node's memory of the commands that it has seen: ``max_commands``, and ``max_bytes`` of answers.

    A command is known while it runs, and until the end of the second in which its deadline is: after that the
    relay does not send it again. Answers are evicted before that, the oldest first; a repeat of such a
    command must be refused.
    """

    def __init__(self, max_commands: int = FEWEST_COMMANDS, max_bytes: int = MAX_ANSWER_BYTES) -> None:
        self._max_commands = max_commands
        self._max_bytes = max_bytes
        self._known: dict[int, _CommandIds] = {}  # by the second of the deadline
        self._count = 0
        self._running: set[str] = set()
        self._answers: OrderedDict[str, bytes] = OrderedDict()
        self._answer_bytes = 0

    def admit(self, msg_id: str, expires_at_ms: int, now_ms: int) -> CommandStatus:
        """Remember ``msg_id``, a ULID, as running if it is new and there is room, and return which."""
        if msg_id in self._running or msg_id in self._answers:
            return CommandStatus.SEEN
        for second in [second for second in self._known if second < now_ms // 1000]:
            self._count -= len(self._known.pop(second))
        packed = msg_id.encode("ascii")
        for known in self._known.values():
            if packed in known:
                return CommandStatus.FORGOTTEN
        if self._count >= self._max_commands:
            return CommandStatus.FULL
        self._known.setdefault(expires_at_ms // 1000, _CommandIds()).add(packed)
        self._count += 1
        self._running.add(msg_id)
        return CommandStatus.NEW

    def remember(self, msg_id: str, answer: CmdAck) -> None:
        """Keep ``answer``, the payload of the ack to an admitted command, for when it comes again.

        Raises:
            TypeError, ValueError: it is not JSON.
        """
        # As text: a small dictionary takes several times as much memory.
        text = _ENCODER.encode(answer).encode("ascii")
        if (before := self._answers.pop(msg_id, None)) is not None:
            self._answer_bytes -= ANSWER_BYTES + len(before)
        elif msg_id in self._running:
            self._running.remove(msg_id)
        else:
            return
        if ANSWER_BYTES + len(text) > self._max_bytes:
            return
        self._answers[msg_id] = text
        self._answer_bytes += ANSWER_BYTES + len(text)
        while self._answer_bytes > self._max_bytes:
            _, evicted = self._answers.popitem(last=False)
            self._answer_bytes -= ANSWER_BYTES + len(evicted)

    def recall(self, msg_id: str) -> CmdAck | None:
        """Return the answer to ``msg_id``; None while there is none, or if it is not kept any more."""
        text = self._answers.get(msg_id)
        if text is None:
            return None
        answer: CmdAck = json.loads(text)
        return answer

    def runs(self, msg_id: str) -> bool:
        """Return whether ``msg_id`` was admitted and has no answer yet."""
        return msg_id in self._running


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
