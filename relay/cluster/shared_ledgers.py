"""Keeps the ledgers of this relay and the stream of the fleet's shared ledgers equal.

What only the files have is appended to the stream, and what only the stream has is added to the files, from
the beginning with each connection: nothing is remembered but the files, so that a relay that starts without
NATS knows all that it was told. An entry that is not understood may be a revocation: ``understands`` is false
until it is understood, or gone. A ledger that cannot be kept equal is tried again by itself, and keeps no
other waiting. Must not know what an entry says.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress

from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError
from structlog.typing import FilteringBoundLogger

from relay.cluster.ledger_reading import CountEntry, LedgerReading, LostReaderError, Shared
from relay.cluster.ledger_stream import MAX_STREAM_BYTES, LedgerStream, NotUnderstoodError, UnfitEntryError
from relay.cluster.reasons import reason_of
from relay.cluster.retry_backoff import RetryBackoff
from relay.ledger import Entry
from relay.shared_ledger import AT_ONCE, SharedLedger
from schemas.error_roots import PeerError, StateError
from schemas.text import printable

_CHECK_INTERVAL_S = 2.5
_CHECKS_FOR_ONE_COUNT = 24
"""The entries are counted each minute."""
_TIMEOUT_S = 2.0
_END_S = 1.0
_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S, _LONGEST_WAIT_TO_READ_S = 10.0, 30.0
_READ_AGAIN_S = 5.0

OnThread = Callable[[Callable[[], Mapping[str, Entry]]], Awaitable[Mapping[str, Entry]]]
"""Runs a function that waits for a disk."""


class SharedLedgers:
    """``ledgers``, each with a file of its own, and ``stream``: a ``relay.shared_ledger.Sharing``.

    ``filled`` is told which share of the stream is used; ``chance`` is uniform in [0, 1).

    Attributes:
        is_current: whether files and stream are equal, and were found so lately.
    """

    def __init__(  # noqa: PLR0913 - what comes in from outside
        self,
        ledgers: Sequence[SharedLedger],
        stream: LedgerStream,
        *,
        on_thread: OnThread,
        count: CountEntry,
        filled: Callable[[float], None],
        chance: Callable[[], float],
        log: FilteringBoundLogger,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._ledgers = ledgers
        self._stream = stream
        self._on_thread = on_thread
        self._count = count
        self._filled = filled
        self._chance = chance
        self._backoff = RetryBackoff(_FIRST_WAIT_S, _LONGEST_WAIT_TO_READ_S, chance)
        self._log = log
        self._sleep = sleep
        self._wake = asyncio.Event()
        self._written = asyncio.Event()
        self._understands = True
        self._problem = ""
        self._reported: dict[str, str] = {}
        self._client: Client | None = None
        self._answers = True
        self.is_current = False
        self._reading = self._new_reading()

    def _begin(self) -> None:
        self._understands = self.understands
        self.is_current = False
        self._answers = True
        self._reading = self._new_reading()

    def _new_reading(self) -> LedgerReading:
        backoffs = (RetryBackoff(_FIRST_WAIT_S, _LONGEST_WAIT_S, self._chance) for _ in self._ledgers)
        return LedgerReading(
            self._stream,
            map(Shared, self._ledgers, backoffs),
            is_told=not self._understands,
            wake=self._wake.set,
            count=self._count,
            log=self._log,
        )

    @property
    def understands(self) -> bool:
        """Whether all that was read is understood; what was not stays so until it is, or is gone."""
        return self._understands and self._reading.not_understood is None

    @property
    def problem(self) -> str:
        """Why files and stream are not equal; empty if that was not tried, or they are."""
        return self._problem

    def changed(self, *kinds: str) -> None:
        """Take in that there may be new entries of ``kinds`` in the files."""
        for kind in kinds:
            self._reading.shared[kind].due = True
        self._wake.set()

    async def written(self, within_s: float) -> None:
        """Return when entries of other relays were added to a file, or after ``within_s``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._written.wait()
        self._written.clear()

    async def serve(self, client: Client) -> None:
        """Keep files and stream equal, by ``client``, until cancelled."""
        self._client, context = client, client.jetstream(timeout=_TIMEOUT_S)
        while client.is_connected:
            wait_s = None
            try:
                await self._follow(context)
            except* NotUnderstoodError as errors:
                self._report(errors.exceptions[0])
                wait_s = _READ_AGAIN_S
            except* (NatsError, PeerError, OSError) as errors:
                self._report(errors.exceptions[0])
            await self._sleep(wait_s or self._backoff.wait_s())

    def _report(self, error: Exception, kind: str = "all") -> None:
        """Log why the ledger of that kind is not equal: once, until it is, or the reason is another."""
        self.is_current = False
        if self._client is None or not self._client.is_connected:
            return
        self._problem = reason_of(error)
        if self._reported.get(kind) != self._problem:
            self._reported[kind] = self._problem
            self._log.error("shared ledgers not current", ledger=kind, reason=self._problem)

    async def _follow(self, context: JetStreamContext) -> None:
        self._begin()
        subscription = await self._stream.follow(context, self._reading.arrive)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._keep_equal(context, tasks))
                tasks.create_task(self._check(context, subscription))
        finally:
            self.is_current = False
            with suppress(NatsError, TimeoutError):
                async with asyncio.timeout(_END_S):
                    await subscription.unsubscribe()

    async def _keep_equal(self, context: JetStreamContext, tasks: asyncio.TaskGroup) -> None:
        await self._reading.caught_up.wait()
        while True:
            self._wake.clear()
            for shared in self._reading.shared.values():
                if shared.due and not shared.waits and not await self._is_settled(context, shared):
                    shared.waits = True
                    tasks.create_task(self._try_again(shared))
            if self._reading.not_understood is not None:
                # After the others are kept. All is read again: an operator may have removed it.
                raise self._reading.not_understood
            self._understands = True
            if self._answers and not any(shared.waits for shared in self._reading.shared.values()):
                self._be_current()
            await self._wake.wait()

    def _be_current(self) -> None:
        self.is_current = True
        self._backoff.reset()
        if self._problem:
            self._problem = ""
            self._reported.clear()
            self._log.info("shared ledgers current")

    async def _is_settled(self, context: JetStreamContext, shared: Shared) -> bool:
        """Settle one ledger; return whether that has worked. The others do not wait for it."""
        try:
            await self._settle(context, shared)
        except (NatsError, StateError, OSError) as error:
            self._count(shared.ledger.kind, "failed")
            self._report(error, shared.ledger.kind)
            return False
        shared.backoff.reset()
        return True

    async def _try_again(self, shared: Shared) -> None:
        await self._sleep(shared.backoff.wait_s())
        shared.waits, shared.due = False, True
        self._wake.set()

    async def _settle(self, context: JetStreamContext, shared: Shared) -> None:
        shared.due = False
        arrived, shared.arrived = shared.arrived, {}
        # What arrives from now on is not in the file when the entries are appended.
        newest = shared.newest
        try:
            missing = await self._settled(shared, arrived)
        except (StateError, OSError):
            shared.arrived = arrived | shared.arrived
            raise
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

    async def _settled(self, shared: Shared, arrived: Mapping[str, Entry]) -> Mapping[str, Entry]:
        return await self._on_thread(lambda: shared.ledger.settle(arrived, shared))

    async def _append(
        self, context: JetStreamContext, shared: Shared, key: str, entry: Entry, newest: int
    ) -> int | None:
        """Append an entry of the file; return its sequence number, or None if it was not appended."""
        kind = shared.ledger.kind
        try:
            sequence = await self._stream.append(context, shared.ledger, key, entry, newest)
        except UnfitEntryError as error:
            self._log.error("entry not shared", reason=printable(str(error), 200))
            self._count(kind, "unfit")
            shared.unfit.add(key)  # or it would be tried again with each change
            return None
        self._count(kind, "refused" if sequence is None else "appended")
        if sequence is None and shared.ledger.ordered:
            # Another relay has appended. Its entry is on its way, and has this ledger compared again.
            self._reading.refused_at = self._reading.messages
        return sequence

    async def _check(
        self, context: JetStreamContext, subscription: JetStreamContext.PushSubscription
    ) -> None:
        """End when what is there does not arrive: the servers can lose a reader without a word.

        Also when it is not what was read. Servers that do not answer have lost nothing yet.
        """
        before: int | None = None
        for number in itertools.count():
            try:
                if number % _CHECKS_FOR_ONE_COUNT == 1 % _CHECKS_FOR_ONE_COUNT:
                    await self._compare(context)
                info = await subscription.consumer_info()
            except NotFoundError:
                raise LostReaderError("the servers do not know this reader any more") from None
            except (NatsError, TimeoutError):
                self._answers = False
                self._report(LostReaderError("the servers do not answer"))
            else:
                self._answered()
                is_new = info.delivered is not None and info.delivered.consumer_seq == 0
                self._reading.check_arrival(before, info.num_pending or 0, is_new=is_new)
            before = self._reading.messages
            await self._sleep(_CHECK_INTERVAL_S)

    def _answered(self) -> None:
        if not self._answers:
            self._answers = True
            self._wake.set()

    async def _compare(self, context: JetStreamContext) -> None:
        lasting = self._reading.lasting()
        info = await self._stream.held(context)
        self._filled(info.state.bytes / MAX_STREAM_BYTES)
        self._reading.compare(info, lasting)
