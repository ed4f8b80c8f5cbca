"""The stream of the fleet's shared ledgers, in JetStream: a subject for each key, which keeps its last entry.

So it holds what counts and no history, and the servers remove an entry once it has ended. An entry is
appended with the sequence number that the relay expects: a key that is new must be new to the stream too, and
of an ordered kind the relay must have read all that is there. Must not know what an entry says.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeGuard, cast

from attrs import define, field
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import Header, StreamInfo
from nats.js.errors import NotFoundError

from relay.cluster.client import reason_of
from relay.cluster.jetstream import (
    MAX_ENTRY_BYTES,
    MAX_LEDGER_BYTES,
    append,
    check_readers,
    checked,
    ledger_stream,
)
from relay.cluster.signed_entries import NoCertificateError, NotSignedError, SignedDocuments
from relay.observability.ascii_json import encoded
from relay.state.ledger import Entry
from relay.state.merging import SIGNED, SharedLedger
from relay.state.sharer import (
    Arrived,
    LostReaderError,
    NotTakenError,
    NotUnderstoodError,
    StreamEntry,
    StreamError,
    StreamFacts,
    UnfitEntryError,
)
from schemas.registry import SchemaRegistry, Validator
from schemas.strict_json import StrictJsonError, loads
from schemas.text import printable
from schemas.times import SystemClock

KEPT_AFTER_S = 86_400
"""How long an entry is kept after its end: no clock of a relay or a server is off by as much."""
_LONGEST_KEPT_S = 100 * 365 * 86_400
"""The servers count nanoseconds in 63 bits."""
_SEQUENCE_OF = "Nats-Expected-Last-Subject-Sequence-Subject"
_SHOWN_SUBJECT = 96
_TIMEOUT_S = 2.0
_END_S = 1.0


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
    """The stream of ``fleet`` with the entries of ``ledgers``, which are ``signed``."""

    def __init__(
        self,
        fleet: str,
        ledgers: Iterable[SharedLedger],
        registry: SchemaRegistry,
        now_ms: SystemClock,
        signed: SignedDocuments,
    ) -> None:
        self.now_ms = now_ms
        self.signed = signed
        self.fleet = fleet
        self.wanted = ledger_stream(fleet)
        self.name = str(self.wanted.name)
        self.prefix = f"edge.{fleet}.ledger."
        self.kinds = {
            ledger.kind: _Kind(ledger, registry.load(f"cluster.{ledger.kind}@1.0.0")) for ledger in ledgers
        }

    def connected(self, client: Client) -> "ConnectedStream":
        return ConnectedStream(self, client, client.jetstream(timeout=_TIMEOUT_S))

    def read(self, message: Msg) -> StreamEntry:
        """Return the entry in ``message``.

        Raises:
            NotTakenError: it is of no relay of this fleet.
            NotUnderstoodError: there is none that this relay knows.
        """
        sequence, subject = message.metadata.sequence.stream, printable(message.subject, _SHOWN_SUBJECT)
        name, _, key = message.subject.removeprefix(self.prefix).partition(".")
        try:
            signed = self.signed.read(message.subject, message.data)
        except NotSignedError as error:
            # It may look like any: what no relay has written is not a revocation that others know of.
            raise NotTakenError(sequence, subject, str(error), name, key) from None
        kind = self.kinds.get(name)
        if kind is None:
            raise NotUnderstoodError(sequence, subject, "is of a kind that is not known here")
        try:
            entry = loads(signed.document, max_bytes=MAX_ENTRY_BYTES)
        except StrictJsonError as error:
            raise NotUnderstoodError(sequence, subject, f"is {error.reason}") from None
        if not kind.holds(entry, key):
            raise NotUnderstoodError(sequence, subject, "does not fit its document")
        if signed.by is not None and kind.ledger.form.notes_signed:
            entry = {**entry, SIGNED: True}
        return StreamEntry(name, key, entry, sequence)


@define(eq=False, repr=False)
class ConnectedStream:
    """``stream`` by the connection of ``client``: an ``EntryStream``."""

    _stream: LedgerStream
    _client: Client
    _context: JetStreamContext
    _subscription: JetStreamContext.PushSubscription | None = field(init=False, default=None)
    _reader: tuple[str, object] | None = field(init=False, default=None)

    @property
    def is_connected(self) -> bool:
        return bool(self._client.is_connected)

    @asynccontextmanager
    async def followed(self, arrive: Callable[[Arrived], None]) -> AsyncIterator[None]:
        """Have ``arrive`` called, as ``EntryStream`` has it.

        Raises:
            UnfitStreamError: there is no such stream, or it is configured otherwise.
        """
        stream = self._stream

        async def handle(message: Msg) -> None:
            metadata, subject = message.metadata, printable(message.subject, _SHOWN_SUBJECT)
            read = partial(stream.read, message)
            arrive(Arrived(read, metadata.sequence.stream, subject, metadata.num_pending))

        self._reader = None
        with _stream_errors():
            await self._checked()
            self._subscription = await self._context.subscribe(
                f"{stream.prefix}>",
                stream=stream.name,
                cb=handle,
                ordered_consumer=True,
                pending_bytes_limit=MAX_LEDGER_BYTES,
            )
        try:
            yield
        finally:
            with suppress(NatsError, TimeoutError):
                async with asyncio.timeout(_END_S):
                    await self._subscription.unsubscribe()

    async def pending(self) -> tuple[int, bool]:
        assert self._subscription is not None  # noqa: S101 - while ``followed``
        with _stream_errors():
            info = await self._subscription.consumer_info()
        # The servers know a reader by its name, which another relay may take once it has deleted this one.
        name, made = self._reader or ("", None)
        if name == info.name and made != info.created:
            raise LostReaderError("another relay has replaced this reader by one of its own")
        self._reader = info.name, info.created
        is_new = info.delivered is not None and info.delivered.consumer_seq == 0
        return info.num_pending or 0, is_new

    async def facts(self) -> StreamFacts:
        with _stream_errors():
            info = await self._checked()
        return StreamFacts(info.created, info.state.messages, info.state.bytes / MAX_LEDGER_BYTES)

    async def append(self, ledger: SharedLedger, key: str, entry: Entry, after: int) -> int | None:
        stream = self._stream
        if not stream.kinds[ledger.kind].holds(entry, key):
            raise UnfitEntryError(f"the {ledger.kind} {key} does not fit its document")
        expected = {
            Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: str(after),
            Header.EXPECTED_STREAM.value: stream.name,
        }
        if ledger.ordered:
            expected[_SEQUENCE_OF] = f"{stream.prefix}{ledger.kind}.>"
        end_ms, kept_s = ledger.form.end_ms_of(entry), None
        if end_ms is not None:
            kept_s = min(max(1, (end_ms - stream.now_ms()) // 1000 + KEPT_AFTER_S), _LONGEST_KEPT_S)
        subject = f"{stream.prefix}{ledger.kind}.{key}"
        try:
            written = stream.signed.written(subject, encoded(entry).encode("ascii"))
        except NoCertificateError as error:
            raise StreamError(str(error)) from None
        with _stream_errors():
            return await append(self._context, subject, written, expected=expected, kept_s=kept_s)

    async def _checked(self) -> StreamInfo:
        """Return what the servers say of the stream.

        Raises:
            UnfitStreamError: there is none, or it is configured otherwise.
            NatsError, TimeoutError: they do not answer.
        """
        info = await checked(self._context, self._stream.wanted)
        await check_readers(self._client, self._stream.wanted, self._stream.fleet)
        return info


@contextmanager
def _stream_errors() -> Iterator[None]:
    """Raise what the library raises as StreamError, without its own text where that is not for a person."""
    try:
        yield
    except NotFoundError:
        raise LostReaderError("the servers do not know this reader any more") from None
    except (NatsError, TimeoutError) as error:
        raise StreamError(reason_of(error)) from None
