"""Keeps the ledgers of this relay and the entries that the relays of its fleet share equal.

What only the files have is appended to the stream, and what only the stream has is added to the files, from
the beginning with each connection: nothing is remembered but the files, so that a relay that starts without
the stream knows all that it was told. An entry that is not understood may be a revocation: ``understands`` is
false until it is understood, or gone. A ledger that cannot be kept equal is tried again by itself, and keeps
no other waiting. Must not know what an entry says, nor what carries the stream.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import NamedTuple, Protocol

from attrs import define, field
from structlog.typing import FilteringBoundLogger

from relay.state.ledger import Entry
from relay.state.merging import AT_ONCE, SharedLedger
from schemas.error_roots import EdgeError, PeerError, StateError
from schemas.faults import connection_reason
from schemas.pacing import Backoff, half_by_chance
from schemas.text import printable
from schemas.times import SystemClock

MAX_KEYS = 1_000_000
"""How many entries of the stream are read. One more is not understood."""
MAX_IGNORED = 100_000
"""How many entries of one kind that no relay has signed are replaced by those of files."""
_HOUR_MS = 3_600_000
_CHECK_INTERVAL_S = 2.5
_CHECKS_FOR_ONE_COUNT = 24
"""The entries are counted each minute."""
_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S, _LONGEST_WAIT_TO_READ_S = 10.0, 30.0
_READ_AGAIN_S = 5.0
_SETTLE_S = 30.0
"""How long a file may take until the relay says so: a process that is suspended keeps its lock."""

OnThread = Callable[[Callable[[], Mapping[str, Entry]]], Awaitable[Mapping[str, Entry]]]
"""Runs a function that waits for a disk."""
CountEntry = Callable[[str, str], None]
"""Counts an entry by its kind and by what became of it."""


class StreamError(PeerError):
    """The stream cannot be used; the text says why."""


class LostReaderError(StreamError):
    """What is in the stream does not arrive, or is not what was read: all is to be read again."""


class NotUnderstoodError(PeerError):
    """An entry of the stream cannot be read; the text says which. ``subject`` is printable."""

    def __init__(self, sequence: int, subject: str, problem: str) -> None:
        super().__init__(sequence, subject, problem)
        self.sequence = sequence
        self.subject = subject
        self.problem = problem

    def __str__(self) -> str:
        return f"entry {self.sequence} ({self.subject}) {self.problem}"


class NotTakenError(NotUnderstoodError):
    """An entry is of no relay of the fleet: it is ignored, and may be replaced.

    ``kind`` and ``key`` are those that it has in the stream: not proven.
    """

    def __init__(self, sequence: int, subject: str, problem: str, kind: str, key: str) -> None:
        super().__init__(sequence, subject, problem)
        self.kind = kind
        self.key = key


class HeldBackError(StreamError):
    """Entries wait while a relay of the fleet does not know their kind: it would refuse every call."""


class UnfitEntryError(StateError):
    """An entry of this relay's own file is not one that others understand."""


class StreamEntry(NamedTuple):
    """An entry as the stream has it."""

    kind: str
    key: str
    entry: Entry
    sequence: int


class Arrived(NamedTuple):
    """An entry that has arrived.

    Attributes:
        read: returns it, or raises NotUnderstoodError.
        sequence, subject: name it, also where it cannot be read; printable.
        following: how many have not arrived yet.
    """

    read: Callable[[], StreamEntry]
    sequence: int
    subject: str
    following: int


class StreamFacts(NamedTuple):
    """What the servers say of the stream: when it was made, how many entries it has, how full it is."""

    made: object
    entries: int
    filled: float


class EntryStream(Protocol):
    """The stream by one connection. Where the servers do not answer, or refuse, it raises StreamError."""

    @property
    def is_connected(self) -> bool:
        """Whether the connection is there."""
        ...

    def followed(self, arrive: Callable[[Arrived], None]) -> AbstractAsyncContextManager[None]:
        """Have ``arrive`` called for every entry, from the oldest, and for those that follow."""
        ...

    async def pending(self) -> tuple[int, bool]:
        """Return how many entries have not arrived, and whether none was ever sent; while ``followed``.

        Raises:
            LostReaderError: the servers do not know this reader.
        """
        ...

    async def facts(self) -> StreamFacts:
        """Return what the servers say of the stream."""
        ...

    async def append(self, ledger: SharedLedger, key: str, entry: Entry, after: int) -> int | None:
        """Append ``entry``; return its sequence number, or None if another relay has appended meanwhile.

        ``after`` is the newest sequence number of its kind that was read, for a kind that is ordered, or else
        that of what is replaced, 0 for nothing.

        Raises:
            UnfitEntryError: the others would not understand it.
        """
        ...


class Sharing(Protocol):
    """What shares the ledgers with the other relays of the fleet."""

    @property
    def understands(self) -> bool:
        """Whether all that this relay was told is understood; it may have been a revocation. Thread-safe."""
        ...

    def changed(self, *kinds: str) -> None:
        """Compare ``kinds`` again: there may be new entries in their files."""
        ...

    async def written(self, within_s: float) -> None:
        """Return when entries of other relays were added to a file, or after ``within_s``."""
        ...


class NotShared:
    """The ``Sharing`` of a relay that has its fleet alone."""

    understands = True

    def changed(self, *kinds: str) -> None:
        """There is no other relay."""

    async def written(self, within_s: float) -> None:
        await asyncio.sleep(within_s)


@define(eq=False)
class Compared:
    """One ledger, and what is known of its entries in the stream.

    Attributes:
        backoff: for how long it waits after a failure.
        known: the keys of those that were read, and when each ends.
        unfit: the keys of those of the file that others would not understand.
        arrived: the entries that were read, and are not in the file yet.
        newest: the sequence number of the newest.
        ignored: the keys under which there is what no relay has written, and its sequence number.
        due: whether file and stream are to be compared.
        waits: whether that has failed, and is not tried again yet.
    """

    ledger: SharedLedger
    backoff: Backoff
    known: dict[str, int | None] = field(factory=dict)
    unfit: set[str] = field(factory=set)
    arrived: dict[str, Entry] = field(factory=dict)
    newest: int = 0
    ignored: dict[str, int] = field(factory=dict)
    due: bool = True
    waits: bool = False

    def __contains__(self, key: object) -> bool:
        """Return whether the entry with that key need not be appended. Thread-safe."""
        return key in self.known or key in self.unfit


@define(eq=False, repr=False)
class Reading:
    """What one reading of the stream has brought. With each all is forgotten and read again.

    Attributes:
        ledgers: what is compared, by kind.
        messages: how many entries have arrived.
        refused_at: ``messages`` when the stream last refused an entry, because another relay was first.
        not_understood: the first entry that is not understood, if there is one.
        caught_up: set once all has arrived that was in the stream.
    """

    ledgers: Mapping[str, Compared]
    _now_ms: SystemClock = field(kw_only=True)
    _is_reported: bool = field(kw_only=True)
    _wake: Callable[[], None] = field(kw_only=True)
    _count: CountEntry = field(kw_only=True)
    _log: FilteringBoundLogger = field(kw_only=True)
    messages: int = field(init=False, default=0)
    refused_at: int | None = field(init=False, default=None)
    not_understood: NotUnderstoodError | None = field(init=False, default=None)
    caught_up: asyncio.Event = field(init=False, factory=asyncio.Event)
    _made: object = field(init=False, default=None)
    _ignores: bool = field(init=False, default=False)
    # How many entries end in the hour that begins then, and how many never end.
    _ends: Counter[int | None] = field(init=False, factory=Counter)

    def arrive(self, arrived: Arrived) -> None:
        """Take an entry that has arrived; one that cannot be read is not understood."""
        self.messages += 1
        try:
            self._take(arrived.read())
        except NotTakenError as error:
            self._ignore(error)
        except NotUnderstoodError as error:
            self._misunderstand(error)
        except Exception as error:  # noqa: BLE001 - what carries it would drop what may be a revocation
            if not self._is_reported and self.not_understood is None:
                self._log.error("entry not read", exc_info=error)
            problem = "is not read: see the log"
            self._misunderstand(NotUnderstoodError(arrived.sequence, arrived.subject, problem))
        if arrived.following == 0:
            self.caught_up.set()
        self._wake()

    def _misunderstand(self, error: NotUnderstoodError) -> None:
        self.not_understood = self.not_understood or error
        self._count("unknown", "not_understood")

    def _ignore(self, error: NotTakenError) -> None:
        """Note that an entry is to be replaced, if the file of this relay has one of its key."""
        if not self._ignores:
            self._ignores = True
            self._log.error("entries that no relay has signed are not taken", first=str(error))
        compared = self.ledgers.get(error.kind)
        self._count(error.kind if compared is not None else "unknown", "not_signed")
        if compared is None or (len(compared.ignored) >= MAX_IGNORED and error.key not in compared.ignored):
            return
        compared.ignored[error.key] = error.sequence
        compared.newest = max(compared.newest, error.sequence)
        compared.arrived.pop(error.key, None)
        if error.key in compared.known:
            self._ends[_hour_of(compared.known.pop(error.key))] -= 1
        compared.due = True

    def _take(self, read: StreamEntry) -> None:
        compared = self.ledgers[read.kind]
        count = sum(len(each.known) for each in self.ledgers.values())
        if count >= MAX_KEYS and read.key not in compared.known:
            raise NotUnderstoodError(read.sequence, read.key, f"is one of more than {MAX_KEYS}")
        end_ms = compared.ledger.form.end_ms_of(read.entry)
        if read.key in compared.known:
            self._ends[_hour_of(compared.known[read.key])] -= 1
        compared.known[read.key] = end_ms
        compared.ignored.pop(read.key, None)
        self._ends[_hour_of(end_ms)] += 1
        compared.arrived[read.key] = read.entry
        compared.newest = max(compared.newest, read.sequence)
        compared.due = True

    def lasting(self) -> int:
        """Return how many entries were read that the servers still keep, but for those that end in this hour.

        Read from a count of each hour: each minute, on the event loop, of up to a million entries.
        """
        now = self._now_ms()
        return sum(count for hour_ms, count in self._ends.items() if hour_ms is None or hour_ms > now)

    def compare(self, facts: StreamFacts, lasting: int) -> None:
        """Compare what the servers say of the stream with what was read: ``lasting``, before they said it.

        Raises:
            LostReaderError: it was made anew, or has lost entries, which are to be appended again.
        """
        self._made = self._made or facts.made
        if facts.made != self._made or facts.entries < lasting:
            raise LostReaderError("entries were removed from the stream: all is read again")

    def check_arrival(self, before: int | None, pending: int, *, is_new: bool) -> None:
        """Compare what has arrived with ``pending``, which have not; ``before`` had some seconds ago.

        ``is_new``: none was ever sent to this relay.

        Raises:
            LostReaderError: nothing arrives, although there is something.
        """
        if before == self.messages:
            if pending or self.refused_at == before:
                raise LostReaderError("what is in the stream does not arrive")
            # What was pending may have been removed.
            self.caught_up.set()
        elif is_new and not pending:
            self.caught_up.set()  # there is no entry


def _hour_of(end_ms: int | None) -> int | None:
    """Return when the hour begins in which an entry ends; None of one that never ends."""
    return None if end_ms is None else end_ms - end_ms % _HOUR_MS


@define(eq=False, repr=False)
class Sharer:
    """Shares ``ledgers``, each with a file of its own: a ``Sharing``.

    ``filled`` is called with the share of the stream that is used. ``older_relay`` returns a relay of the
    fleet that does not know what relays know from a version on. ``chance`` is uniform in [0, 1).

    Attributes:
        is_current: whether files and stream are equal, and were found so lately.
        problem: why they are not equal; empty if that was not tried, or they are.
    """

    _ledgers: Sequence[SharedLedger]
    _now_ms: SystemClock = field(kw_only=True)
    _on_thread: OnThread = field(kw_only=True)
    _count: CountEntry = field(kw_only=True)
    _filled: Callable[[float], None] = field(kw_only=True)
    _older_relay: Callable[[str], str | None] = field(kw_only=True)
    _chance: Callable[[], float] = field(kw_only=True)
    _log: FilteringBoundLogger = field(kw_only=True)
    _sleep: Callable[[float], Awaitable[None]] = field(kw_only=True, default=asyncio.sleep)
    _backoff: Backoff = field(init=False)
    _wake: asyncio.Event = field(init=False, factory=asyncio.Event)
    _written: asyncio.Event = field(init=False, factory=asyncio.Event)
    _understands: bool = field(init=False, default=True)
    _reported: dict[str, str] = field(init=False, factory=dict)
    _stream: EntryStream | None = field(init=False, default=None)
    _answers: bool = field(init=False, default=True)
    is_current: bool = field(init=False, default=False)
    problem: str = field(init=False, default="")
    _reading: Reading = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._backoff = Backoff(_FIRST_WAIT_S, _LONGEST_WAIT_TO_READ_S, half_by_chance(self._chance))
        self._reading = self._new_reading()

    def _new_reading(self) -> Reading:
        drawn = half_by_chance(self._chance)
        return Reading(
            {
                ledger.kind: Compared(ledger, Backoff(_FIRST_WAIT_S, _LONGEST_WAIT_S, drawn))
                for ledger in self._ledgers
            },
            now_ms=self._now_ms,
            is_reported=not self._understands,
            wake=self._wake.set,
            count=self._count,
            log=self._log,
        )

    @property
    def understands(self) -> bool:
        """Whether all that was read is understood; what was not stays so until it is, or is gone."""
        return self._understands and self._reading.not_understood is None

    def changed(self, *kinds: str) -> None:
        for kind in kinds:
            self._reading.ledgers[kind].due = True
        self._wake.set()

    async def written(self, within_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._written.wait()
        self._written.clear()

    async def serve(self, stream: EntryStream) -> None:
        """Keep files and stream equal, by ``stream``, until its connection ends."""
        self._stream = stream
        while stream.is_connected:
            wait_s = None
            try:
                await self._follow(stream)
            except* NotUnderstoodError as errors:
                self._report(errors.exceptions[0])
                wait_s = _READ_AGAIN_S
            except* (PeerError, OSError) as errors:
                if self._stream is stream:  # not of one that has ended, after the next has begun
                    self._report(errors.exceptions[0])
            await self._sleep(wait_s or self._backoff.next_s())

    def _report(self, error: Exception, kind: str = "all") -> None:
        """Log why the ledger of that kind is not equal: once, until it is, or the reason is another."""
        self.is_current = False
        if self._stream is None or not self._stream.is_connected:
            return
        self.problem = _reason_of(error)
        if self._reported.get(kind) != self.problem:
            self._reported[kind] = self.problem
            self._log.error("shared ledgers not current", ledger=kind, reason=self.problem)

    async def _follow(self, stream: EntryStream) -> None:
        self._understands, self._answers = self.understands, True
        self._reading = self._new_reading()
        try:
            async with stream.followed(self._reading.arrive), asyncio.TaskGroup() as tasks:
                tasks.create_task(self._keep_equal(stream, tasks))
                tasks.create_task(self._check(stream))
        finally:
            if self._stream is stream:
                self.is_current = False

    async def _keep_equal(self, stream: EntryStream, tasks: asyncio.TaskGroup) -> None:
        await self._reading.caught_up.wait()
        while True:
            self._wake.clear()
            for compared in self._reading.ledgers.values():
                if compared.due and not compared.waits:
                    await self._settle_or_wait(stream, compared, tasks)
            if self._reading.not_understood is not None:
                # After the others are kept. All is read again: an operator may have removed it.
                raise self._reading.not_understood
            self._understands = True
            if self._answers and not any(each.waits for each in self._reading.ledgers.values()):
                self.is_current = True
                self._backoff.reset()
                if self.problem:
                    self.problem = ""
                    self._reported.clear()
                    self._log.info("shared ledgers current")
            await self._wake.wait()

    async def _settle_or_wait(
        self, stream: EntryStream, compared: Compared, tasks: asyncio.TaskGroup
    ) -> None:
        """Settle one ledger, or have that tried again: the others do not wait for it."""
        kind = compared.ledger.kind
        try:
            await self._settle(stream, compared)
        except Exception as error:
            if not stream.is_connected:
                raise  # what carries it may have swallowed the cancellation with which that has ended
            if not isinstance(error, (StreamError, StateError, OSError)):
                self._log.error("shared ledger failed", ledger=kind, exc_info=error)
            self._count(kind, "failed")
            self._report(error, kind)
            compared.waits = True
            tasks.create_task(self._try_again(compared))
        else:
            compared.backoff.reset()

    async def _try_again(self, compared: Compared) -> None:
        await self._sleep(compared.backoff.next_s())
        compared.waits, compared.due = False, True
        self._wake.set()

    async def _settle(self, stream: EntryStream, compared: Compared) -> None:
        compared.due = False
        arrived, compared.arrived = compared.arrived, {}
        # What arrives from now on is not in the file when the entries are appended.
        newest = compared.newest
        try:
            missing = await self._run_settle(compared, arrived)
        except Exception:
            compared.arrived = arrived | compared.arrived
            raise
        if arrived:
            self._written.set()
        if len(missing) >= AT_ONCE:
            compared.due = True
            self._wake.set()
        ledger = compared.ledger
        if missing and (older := self._older_relay(ledger.row.since)) is not None:
            raise HeldBackError(
                f"{ledger.kind}: kept here until relay {older} has version {ledger.row.since}"
            )
        for key, entry in missing.items():
            appended = await self._append(stream, compared, key, entry, newest)
            if compared.ledger.ordered:
                if appended is None:
                    return
                newest = appended
                # At once: the entry that comes back may be replaced by a later one of another relay.
                await self._run_settle(compared, {key: entry})

    async def _run_settle(self, compared: Compared, arrived: Mapping[str, Entry]) -> Mapping[str, Entry]:
        slow = StateError(f"its file takes more than {_SETTLE_S:.0f} s: another process may hold its lock")
        report = asyncio.get_running_loop().call_later(_SETTLE_S, self._report, slow, compared.ledger.kind)
        try:
            return await self._on_thread(lambda: compared.ledger.settle(arrived, compared))
        finally:
            report.cancel()

    async def _append(
        self, stream: EntryStream, compared: Compared, key: str, entry: Entry, newest: int
    ) -> int | None:
        """Append an entry of the file; return its sequence number, or None if it was not appended."""
        kind = compared.ledger.kind
        after = newest if compared.ledger.ordered else compared.ignored.get(key, 0)
        try:
            sequence = await stream.append(compared.ledger, key, entry, after)
        except UnfitEntryError as error:
            self._log.error("entry not shared", reason=printable(str(error), 200))
            self._count(kind, "unfit")
            compared.unfit.add(key)  # or it would be tried again with each change
            return None
        self._count(kind, "refused" if sequence is None else "appended")
        if sequence is None and compared.ledger.ordered:
            # Another relay has appended. Its entry is on its way, and has this ledger compared again.
            self._reading.refused_at = self._reading.messages
        return sequence

    async def _check(self, stream: EntryStream) -> None:
        """End when what is there does not arrive: the servers can lose a reader without a word.

        Also when it is not what was read. Servers that do not answer have lost nothing yet.
        """
        before: int | None = None
        for number in itertools.count():
            try:
                if number % _CHECKS_FOR_ONE_COUNT == 1 % _CHECKS_FOR_ONE_COUNT:
                    lasting = self._reading.lasting()
                    facts = await stream.facts()
                    self._filled(facts.filled)
                    self._reading.compare(facts, lasting)
                pending, is_new = await stream.pending()
            except LostReaderError:
                raise
            except StreamError:
                self._answers = False
                self._report(LostReaderError("the servers do not answer"))
            else:
                if not self._answers:
                    self._answers = True
                    self._wake.set()
                self._reading.check_arrival(before, pending, is_new=is_new)
            before = self._reading.messages
            await self._sleep(_CHECK_INTERVAL_S)


def _reason_of(error: Exception) -> str:
    if isinstance(error, OSError) and not isinstance(error, EdgeError):
        return connection_reason(error)
    return printable(str(error) or type(error).__name__, 1024)
