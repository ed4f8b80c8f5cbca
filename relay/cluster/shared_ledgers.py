"""Keeps the ledgers of this relay and the stream of the fleet's shared ledgers equal.

What only the files have is appended to the stream, and what only the stream has is added to the files, from
the beginning with each connection: nothing is remembered but the files, so that a relay that starts without
NATS knows all that it was told. An entry that is not understood may be a revocation: ``understands`` is false
until it is understood, or gone. Must not know what an entry says.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from structlog.typing import FilteringBoundLogger

from relay.cluster.ledger_stream import LedgerStream, NotUnderstoodError, StreamEntry, UnfitEntryError
from relay.ledger import Entry
from relay.shared_ledger import AT_ONCE, SharedLedger
from schemas.error_roots import PeerError, StateError
from schemas.text import printable

MAX_KEYS = 1_000_000
"""How many entries of the stream are read. One more is not understood."""
_CHECK_INTERVAL_S = 2.5
_TIMEOUT_S = 2.0
_RETRY_S = 1.0
_READ_AGAIN_S = 5.0

OnThread = Callable[[Callable[[], Mapping[str, Entry]]], Awaitable[Mapping[str, Entry]]]
"""Runs a function that waits for a disk."""
Count = Callable[[str, str], None]
"""Counts an entry by its kind and by what became of it."""


class _LostReaderError(PeerError):
    """What is in the stream does not arrive."""


@dataclass(slots=True)
class _Shared:
    """One ledger, and what is known of its entries in the stream.

    Attributes:
        known: the keys of those that were read.
        arrived: the entries that were read, and are not in the file yet.
        newest: the sequence number of the newest.
        due: whether file and stream are to be compared.
    """

    ledger: SharedLedger
    known: set[str] = field(default_factory=set)
    arrived: dict[str, Entry] = field(default_factory=dict)
    newest: int = 0
    due: bool = True


class SharedLedgers:
    """``ledgers``, each with a file of its own, and ``stream``: a ``relay.shared_ledger.Sharing``."""

    def __init__(  # noqa: PLR0913 - what comes in from outside
        self,
        ledgers: Sequence[SharedLedger],
        stream: LedgerStream,
        *,
        on_thread: OnThread,
        count: Count,
        log: FilteringBoundLogger,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._ledgers = ledgers
        self._stream = stream
        self._on_thread = on_thread
        self._count = count
        self._log = log
        self._sleep = sleep
        self._wake = asyncio.Event()
        self._written = asyncio.Event()
        self._understands = True
        self._problem = ""
        self._begin()

    def _begin(self) -> None:
        self._shared = {ledger.kind: _Shared(ledger) for ledger in self._ledgers}
        self._not_understood: NotUnderstoodError | None = None
        self._caught_up = asyncio.Event()
        self._messages = 0
        self._refused_at: int | None = None
        self.is_current = False

    @property
    def understands(self) -> bool:
        """Whether all that was read is understood; what was not stays so until it is, or is gone."""
        return self._understands

    @property
    def problem(self) -> str:
        """Why files and stream are not equal; empty if that was not tried, or they are."""
        return self._problem

    def changed(self, kind: str | None = None) -> None:
        """Take in that the file of that kind, or any, may have new entries."""
        for shared in self._shared.values():
            shared.due |= kind in {None, shared.ledger.kind}
        self._wake.set()

    async def written(self, within_s: float) -> None:
        """Return when entries of other relays were added to a file, or after ``within_s``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._written.wait()
        self._written.clear()

    async def serve(self, client: Client) -> None:
        """Keep files and stream equal, by ``client``, until cancelled."""
        context = client.jetstream(timeout=_TIMEOUT_S)
        while client.is_connected:
            wait_s = _RETRY_S
            try:
                await self._follow(context)
            except* NotUnderstoodError as errors:
                self._report(errors)
                wait_s = _READ_AGAIN_S
            except* (NatsError, PeerError, StateError, OSError) as errors:
                if client.is_connected:
                    self._report(errors)
            await self._sleep(wait_s)

    def _report(self, errors: BaseExceptionGroup[Exception]) -> None:
        problem = printable(str(errors.exceptions[0]) or "no answer", 200)
        if problem != self._problem:
            self._log.error("shared ledgers not current", reason=problem)
        self._problem = problem

    async def _follow(self, context: JetStreamContext) -> None:
        self._begin()
        subscription = await self._stream.follow(context, self._arrive)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._keep_equal(context))
                tasks.create_task(self._check(subscription))
        finally:
            self.is_current = False
            with suppress(NatsError, TimeoutError):
                async with asyncio.timeout(_RETRY_S):
                    await subscription.unsubscribe()

    async def _arrive(self, message: Msg) -> None:
        self._messages += 1
        try:
            self._take(self._stream.read(message))
        except NotUnderstoodError as error:
            self._misunderstand(error)
        except Exception as error:  # noqa: BLE001 - the library would drop what may be a revocation
            if self._understands:
                self._log.error("entry not read", exc_info=error)
            sequence = message.metadata.sequence.stream
            self._misunderstand(NotUnderstoodError(sequence, message.subject, "is not read: see the log"))
        if message.metadata.num_pending == 0:
            self._caught_up.set()
        self._wake.set()

    def _misunderstand(self, error: NotUnderstoodError) -> None:
        self._understands = False
        self._not_understood = self._not_understood or error
        self._count("unknown", "not_understood")

    def _take(self, read: StreamEntry) -> None:
        shared = self._shared[read.ledger.kind]
        count = sum(len(each.known) for each in self._shared.values())
        if count >= MAX_KEYS and read.key not in shared.known:
            raise NotUnderstoodError(read.sequence, read.key, f"is one of more than {MAX_KEYS}")
        shared.known.add(read.key)
        shared.arrived[read.key] = read.entry
        shared.newest = max(shared.newest, read.sequence)
        shared.due = True

    async def _keep_equal(self, context: JetStreamContext) -> None:
        await self._caught_up.wait()
        while True:
            self._wake.clear()
            for shared in self._shared.values():
                if shared.due:
                    await self._settle(context, shared)
            if self._not_understood is not None:
                # After the others are kept. All is read again: an operator may have removed it.
                raise self._not_understood
            self._understands = self.is_current = True
            if self._problem:
                self._problem = ""
                self._log.info("shared ledgers current")
            await self._wake.wait()

    async def _settle(self, context: JetStreamContext, shared: _Shared) -> None:
        shared.due = False
        arrived, shared.arrived = shared.arrived, {}
        # What arrives from now on is not in the file when the entries are appended.
        newest = shared.newest
        missing = await self._settled(shared, arrived)
        if arrived:
            self._written.set()
        if len(missing) >= AT_ONCE:
            shared.due = True
            self._wake.set()
        for key, entry in missing.items():
            appended = await self._append(context, shared, key, entry, newest)
            if shared.ledger.ordered:
                if appended is None:
                    return
                newest = appended
                # At once: the entry that comes back may be replaced by a later one of another relay.
                await self._settled(shared, {key: entry})

    async def _settled(self, shared: _Shared, arrived: Mapping[str, Entry]) -> Mapping[str, Entry]:
        known = frozenset(shared.known)
        return await self._on_thread(lambda: shared.ledger.settle(arrived, known))

    async def _append(
        self, context: JetStreamContext, shared: _Shared, key: str, entry: Entry, newest: int
    ) -> int | None:
        """Append an entry of the file; return its sequence number, or None if it was not appended."""
        kind = shared.ledger.kind
        try:
            sequence = await self._stream.append(context, shared.ledger, key, entry, newest)
        except UnfitEntryError as error:
            self._log.error("entry not shared", reason=printable(str(error), 200))
            self._count(kind, "unfit")
            shared.known.add(key)  # or it would be tried again with each change
            return None
        self._count(kind, "refused" if sequence is None else "appended")
        if sequence is None and shared.ledger.ordered:
            # Another relay has appended. Its entry is on its way, and has this ledger compared again.
            self._refused_at = self._messages
        return sequence

    async def _check(self, subscription: JetStreamContext.PushSubscription) -> None:
        """End when what is there does not arrive: the servers can lose a reader without a word."""
        info = await subscription.consumer_info()
        if info.num_pending == 0 and info.delivered is not None and info.delivered.consumer_seq == 0:
            self._caught_up.set()  # there is no entry
        while True:
            before = self._messages
            await self._sleep(_CHECK_INTERVAL_S)
            pending = (await subscription.consumer_info()).num_pending
            if before == self._messages and (pending or self._refused_at == before):
                raise _LostReaderError("what is in the stream does not arrive")
