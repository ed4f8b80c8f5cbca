"""The stream of the fleet's shared ledgers, in JetStream: a subject for each key, which keeps its last entry.

So it holds what counts and no history, and the servers remove an entry once it has ended. An entry is
appended with the sequence number that the relay expects: a key that is new must be new to the stream too, and
of an ordered kind the relay must have read all that is there. Must not know what an entry says.
"""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TypeGuard, cast

from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, Header, RetentionPolicy, StreamConfig, StreamInfo
from nats.js.errors import NotFoundError

from relay.ascii_json import encoded
from relay.cluster.copies import grow, in_copies
from relay.cluster.expected_sequence import append
from relay.ledger import Entry
from relay.shared_ledger import SharedLedger
from schemas.error_roots import PeerError, StateError
from schemas.registry import SchemaRegistry, Validator
from schemas.strict_json import StrictJsonError, loads
from schemas.text import printable

MAX_ENTRY_BYTES = 2048
MAX_STREAM_BYTES = 256 * 1024 * 1024
"""Of all entries together: half a million certificates."""
KEPT_AFTER_S = 86_400
"""How long an entry is kept after its end: no clock of a relay or a server is off by as much."""
_LONGEST_KEPT_S = 100 * 365 * 86_400
"""The servers count nanoseconds in 63 bits."""
_SETTINGS = (
    "subjects",
    "retention",
    "max_msgs",
    "max_age",
    "max_msgs_per_subject",
    "max_msg_size",
    "max_bytes",
    "discard",
    "allow_msg_ttl",
)
"""What decides whether the stream keeps an entry. The number of copies is not among these: it grows."""
_SEQUENCE_OF = "Nats-Expected-Last-Subject-Sequence-Subject"
_SHOWN_SUBJECT = 96


class NotUnderstoodError(PeerError):
    """An entry of the stream cannot be read; the text says which."""

    def __init__(self, sequence: int, subject: str, problem: str) -> None:
        super().__init__(sequence, subject, problem)
        self.sequence = sequence
        self.subject = printable(subject, _SHOWN_SUBJECT)
        self.problem = problem

    def __str__(self) -> str:
        return f"entry {self.sequence} ({self.subject}) {self.problem}"


class UnfitStreamError(PeerError):
    """The stream is not configured as the relays make it; the text says in what, and what to do."""


class UnfitEntryError(StateError):
    """An entry of this relay's own file is none that others understand."""


@dataclass(frozen=True, slots=True)
class StreamEntry:
    """An entry as the stream has it."""

    ledger: SharedLedger
    key: str
    entry: Entry
    sequence: int


@dataclass(frozen=True, slots=True)
class _Kind:
    ledger: SharedLedger
    document: Validator

    def holds(self, entry: object, key: str) -> TypeGuard[Entry]:
        """Return whether ``entry`` is one of this kind, with that key."""
        if not self.document.is_valid(entry):
            return False
        try:
            return self.ledger.key_of(cast("Entry", entry)) == key
        except ValueError:
            return False


class LedgerStream:
    """The stream of ``fleet`` with the entries of ``ledgers``."""

    def __init__(
        self,
        fleet: str,
        ledgers: Iterable[SharedLedger],
        registry: SchemaRegistry,
        now_ms: Callable[[], int],
    ) -> None:
        self._now_ms = now_ms
        self.name = f"edge_{fleet}_ledger"
        self._prefix = f"edge.{fleet}.ledger."
        self._config = StreamConfig(
            name=self.name,
            subjects=[f"{self._prefix}>"],
            retention=RetentionPolicy.LIMITS,
            max_msgs=-1,
            max_age=0,
            max_msgs_per_subject=1,
            max_msg_size=MAX_ENTRY_BYTES,
            max_bytes=MAX_STREAM_BYTES,
            # What is full refuses entries. It must not forget a revocation for them.
            discard=DiscardPolicy.NEW,
            allow_msg_ttl=True,
        )
        self._kinds = {
            ledger.kind: _Kind(ledger, registry.load(f"cluster.{ledger.kind}@1.0.0")) for ledger in ledgers
        }

    async def follow(
        self, context: JetStreamContext, handle: Callable[[Msg], Awaitable[None]]
    ) -> JetStreamContext.PushSubscription:
        """Have ``handle`` called with every entry, from the oldest, and with those that follow.

        The stream is made if there is none.

        Raises:
            UnfitStreamError: there is one that is configured otherwise.
            NatsError, TimeoutError: the servers do not answer, or do not permit it.
        """
        try:
            await grow(context, await self.held(context))
        except NotFoundError:
            await in_copies(lambda copies: context.add_stream(self._config, num_replicas=copies))
        return await context.subscribe(
            f"{self._prefix}>",
            stream=self.name,
            cb=handle,
            ordered_consumer=True,
            pending_bytes_limit=MAX_STREAM_BYTES,
        )

    async def held(self, context: JetStreamContext) -> StreamInfo:
        """Return what the servers say of the stream.

        Raises:
            UnfitStreamError: it is configured otherwise: it could forget a revocation, or refuse it.
            NotFoundError: there is none.
            NatsError, TimeoutError: they do not answer.
        """
        info = await context.stream_info(self.name)
        for setting in _SETTINGS:
            found, wanted = getattr(info.config, setting), getattr(self._config, setting)
            if found != wanted:
                raise UnfitStreamError(
                    f"the stream {self.name} has {setting} {printable(str(found), 32)} in place of {wanted}: "
                    "find out who has changed it, and delete the stream: the relays make and fill it again"
                )
        return info

    def lasts(self, end_ms: int | None) -> bool:
        """Return whether the servers still keep an entry that ends at ``end_ms``, however clocks are off."""
        return end_ms is None or end_ms > self._now_ms()

    def read(self, message: Msg) -> StreamEntry:
        """Return the entry in ``message``.

        Raises:
            NotUnderstoodError: there is none that this relay knows.
        """
        sequence = message.metadata.sequence.stream
        name, _, key = message.subject.removeprefix(self._prefix).partition(".")
        kind = self._kinds.get(name)
        if kind is None:
            raise NotUnderstoodError(sequence, message.subject, "is of a kind that is not known here")
        try:
            entry = loads(message.data, max_bytes=MAX_ENTRY_BYTES)
        except StrictJsonError as error:
            raise NotUnderstoodError(sequence, message.subject, f"is {error.reason}") from None
        if not kind.holds(entry, key):
            raise NotUnderstoodError(sequence, message.subject, "does not fit its document")
        return StreamEntry(kind.ledger, key, entry, sequence)

    async def append(
        self, context: JetStreamContext, ledger: SharedLedger, key: str, entry: Entry, after: int
    ) -> int | None:
        """Append ``entry``; return its sequence number, or None if another relay has appended meanwhile.

        ``after`` is the newest sequence number of its kind that this relay has read, if the kind is ordered.

        Raises:
            UnfitEntryError: the others would not understand it.
            NatsError, TimeoutError: the servers do not take it.
        """
        if not self._kinds[ledger.kind].holds(entry, key):
            raise UnfitEntryError(f"the {ledger.kind} {key} does not fit its document")
        expected = {Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: "0"}
        if ledger.ordered:
            expected = {
                Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: str(after),
                _SEQUENCE_OF: f"{self._prefix}{ledger.kind}.>",
            }
        return await append(
            context,
            f"{self._prefix}{ledger.kind}.{key}",
            encoded(entry).encode("ascii"),
            expected=expected | {Header.EXPECTED_STREAM.value: self.name},
            kept_s=self._kept_s(ledger.end_ms_of(entry)),
        )

    def _kept_s(self, end_ms: int | None) -> int | None:
        """Return for how many seconds the servers keep an entry that ends then; None if they always do."""
        if end_ms is None:
            return None
        return min(max(1, (end_ms - self._now_ms()) // 1000 + KEPT_AFTER_S), _LONGEST_KEPT_S)
