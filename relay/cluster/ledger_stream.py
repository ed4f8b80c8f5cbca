"""The stream of the fleet's shared ledgers, in JetStream: a subject for each key, which keeps its last entry.

So it holds what counts and no history, and the servers remove an entry once it has ended. An entry is
appended with the sequence number that the relay expects: a key that is new must be new to the stream too, and
of an ordered kind the relay must have read all that is there. Must not know what an entry says.
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeGuard, cast

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, Header, RetentionPolicy, StreamConfig, StreamInfo
from nats.js.errors import NotFoundError

from relay.ascii_json import encoded
from relay.cluster.client import reason_of
from relay.cluster.jetstream import append, grow, in_copies
from relay.state.ledger import Entry
from relay.state.merging import SharedLedger
from relay.state.sharer import (
    Arrived,
    EntryReader,
    EntryStream,
    LostReaderError,
    NotUnderstoodError,
    StreamEntry,
    StreamError,
    StreamFacts,
    UnfitEntryError,
)
from schemas.error_roots import PeerError
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
_TIMEOUT_S = 2.0


class UnfitStreamError(PeerError):
    """The stream is not configured as the relays make it; the text says in what, and what to do."""


@dataclass(frozen=True, slots=True)
class _Kind:
    ledger: SharedLedger
    document: Validator

    def holds(self, entry: object, key: str) -> TypeGuard[Entry]:
        """Return whether ``entry`` is one of this kind, with that key."""
        if not self.document.is_valid(entry):
            return False
        entry = cast("Entry", entry)
        if any(isinstance(value, float) for value in entry.values()):
            return False  # to a JSON Schema 1.0 is an integer
        try:
            return self.ledger.form.key_of(entry) == key
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

    def connected(self, client: Client) -> EntryStream:
        return _ConnectedStream(self, client)

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

    def read(self, message: Msg) -> StreamEntry:
        """Return the entry in ``message``.

        Raises:
            NotUnderstoodError: there is none that this relay knows.
        """
        sequence, subject = message.metadata.sequence.stream, printable(message.subject, _SHOWN_SUBJECT)
        name, _, key = message.subject.removeprefix(self._prefix).partition(".")
        kind = self._kinds.get(name)
        if kind is None:
            raise NotUnderstoodError(sequence, subject, "is of a kind that is not known here")
        try:
            entry = loads(message.data, max_bytes=MAX_ENTRY_BYTES)
        except StrictJsonError as error:
            raise NotUnderstoodError(sequence, subject, f"is {error.reason}") from None
        if not kind.holds(entry, key):
            raise NotUnderstoodError(sequence, subject, "does not fit its document")
        return StreamEntry(name, key, entry, sequence)

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
            kept_s=self._kept_s(ledger.form.end_ms_of(entry)),
        )

    def _kept_s(self, end_ms: int | None) -> int | None:
        """Return for how many seconds the servers keep an entry that ends then; None if they always do."""
        if end_ms is None:
            return None
        return min(max(1, (end_ms - self._now_ms()) // 1000 + KEPT_AFTER_S), _LONGEST_KEPT_S)


class _ConnectedStream:
    """``stream`` by the connection of ``client``: an ``EntryStream``."""

    def __init__(self, stream: LedgerStream, client: Client) -> None:
        self._stream = stream
        self._client = client
        self._context = client.jetstream(timeout=_TIMEOUT_S)

    @property
    def is_connected(self) -> bool:
        return bool(self._client.is_connected)

    async def follow(self, arrive: Callable[[Arrived], None]) -> EntryReader:
        async def handle(message: Msg) -> None:
            metadata, subject = message.metadata, printable(message.subject, _SHOWN_SUBJECT)
            read = partial(self._stream.read, message)
            arrive(Arrived(read, metadata.sequence.stream, subject, metadata.num_pending))

        with _stream_errors():
            return _Reader(await self._stream.follow(self._context, handle))

    async def facts(self) -> StreamFacts:
        with _stream_errors():
            info = await self._stream.held(self._context)
        return StreamFacts(info.created, info.state.messages, info.state.bytes / MAX_STREAM_BYTES)

    async def append(self, ledger: SharedLedger, key: str, entry: Entry, after: int) -> int | None:
        with _stream_errors():
            return await self._stream.append(self._context, ledger, key, entry, after)


class _Reader:
    """The entries that one subscription brings: an ``EntryReader``."""

    def __init__(self, subscription: JetStreamContext.PushSubscription) -> None:
        self._subscription = subscription

    async def pending(self) -> tuple[int, bool]:
        with _stream_errors():
            info = await self._subscription.consumer_info()
        is_new = info.delivered is not None and info.delivered.consumer_seq == 0
        return info.num_pending or 0, is_new

    async def end(self) -> None:
        with _stream_errors():
            await self._subscription.unsubscribe()


@contextmanager
def _stream_errors() -> Iterator[None]:
    """Raise what the library raises as StreamError, without its own text where that is not for a person."""
    try:
        yield
    except NotFoundError:
        raise LostReaderError("the servers do not know this reader any more") from None
    except (NatsError, TimeoutError) as error:
        raise StreamError(reason_of(error)) from None
