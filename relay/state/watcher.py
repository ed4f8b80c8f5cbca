"""Applies what the operator decides while the relay runs, and knows whether it can be known.

The commands write ledgers, which one thread looks at four times a second: that costs less than a way into
this process. It wakes the event loop for those that have changed alone. Each second the loop polls what no
look has found unchanged, so that a look that hangs holds up no other file. Each file is read on a thread of
its own: with thousands of nodes that takes a while, and calls go on.
A relay that cannot read a ledger cannot know of a revocation, nor that a label now is another node's, so it
must refuse calls (decision 0023). A disk that hangs raises no error, so the age of the last successful read
counts; the thread counts ledgers that have not changed, however busy the event loop is. Must not know what a
ledger says.
"""

import asyncio
import errno
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Event, Lock
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from attrs import define, field
from structlog.typing import FilteringBoundLogger

from relay.state.kinds import KINDS, files_of, kinds_in
from relay.state.ledger import Ledger
from relay.state.merging import StateFile, StateKind
from relay.state.sharer import Sharing
from schemas.error_roots import StateError
from schemas.health import Health, Loop, endless
from schemas.text import printable
from schemas.threads import prestarted_pool

LOOK_S = 0.25
"""How often the ledgers are looked at."""
POLL_S = 1.0
"""How often those are polled that no look has found unchanged."""
LIMIT_S = 3.0
"""How long ago each ledger may have been read."""
SHARED = "shared"
"""What other relays of the fleet have sent: that counts as read while all of it is understood, without a
connection too."""
RESERVED = 8
_ROUND_S = 120.0
"""How long one poll may take: the ledgers of thousands of nodes, on a slow disk."""

_T = TypeVar("_T")
ContentT = TypeVar("ContentT")


class DescriptorReserve:
    """Holds ``count`` file descriptors for what must be read even when connections use up all others.

    A revocation that cannot be read does not take effect. Thread-safe.
    """

    def __init__(self, count: int = RESERVED) -> None:
        self._count = count
        self._held: list[int] = []
        self._lock = Lock()
        self._fill()

    def run(self, read: Callable[[], _T]) -> _T:
        """Return what ``read`` returns; when no descriptor is left, it is run again with the reserved ones.

        ``read`` must close what it opens; descriptors that it keeps are taken again when some are free.
        """
        try:
            found = read()
        except OSError as error:
            if error.errno not in {errno.EMFILE, errno.ENFILE}:
                raise
        else:
            with self._lock:
                self._fill()
            return found
        with self._lock:
            self._release()
            try:
                return read()
            finally:
                self._fill()

    def close(self) -> None:
        with self._lock:
            self._count = 0
            self._release()

    def _fill(self) -> None:
        with suppress(OSError):
            while len(self._held) < self._count:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def _release(self) -> None:
        while self._held:
            os.close(self._held.pop())


class LedgerThreads:
    """``count`` threads, called ``name``, that use ledgers alone, with ``reserve``.

    Enrolments and renewals that wait for a ledger must not delay a revocation.

    Raises:
        NoThreadError: the system has too few left.
    """

    def __init__(self, reserve: DescriptorReserve, count: int, name: str) -> None:
        self._reserve = reserve
        self._threads = prestarted_pool(count, name)

    def run(self, work: Callable[[], _T]) -> asyncio.Future[_T]:
        """Begin ``work``, and return the future of what it returns; it may be run twice."""
        return asyncio.get_running_loop().run_in_executor(self._threads, self._reserve.run, work)


class Freshness:
    """When each of ``sources`` was last read, on a monotonic clock. None is fresh before its first read."""

    def __init__(self, sources: Iterable[str], monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._read_at = dict.fromkeys(sources, -math.inf)

    def read(self, source: str) -> None:
        """Record that ``source`` was read, or was found unchanged."""
        self._read_at[source] = self._monotonic()

    def is_fresh(self) -> bool:
        return min(self._read_at.values()) > self._monotonic() - LIMIT_S

    def health(self) -> Health:
        """Calls are refused while it is not known which tokens and leaves are revoked."""
        return Health.passive(ready=self.is_fresh())


class Record(Protocol):
    """Records a decision once it is in effect."""

    def __call__(self, event: str, **facts: str) -> None:
        """Record ``event``, with ``facts`` of it by name."""
        ...


class Applied(NamedTuple, Generic[ContentT]):
    """What applies a file.

    Attributes:
        read: returns what the file says. Runs on a thread; raises StateError or OSError if it cannot be read.
        begin: applies what was decided before the relay was started, and is on record.
        apply: applies what was decided since, and records it.
        also: returns what differs when something else has changed that is applied with the file. Thread-safe.
    """

    read: Callable[[], ContentT]
    begin: Callable[[ContentT], object]
    apply: Callable[[ContentT], object]
    also: Callable[[], object] = lambda: None


NOTHING_APPLIED = Applied[None](lambda: None, lambda _: None, lambda _: None)
"""Of a file that is read for each use, a change is only shared with other relays."""


@dataclass(frozen=True, slots=True)
class Watched:
    """A file of the table, its ``kinds`` that relays of a fleet share, and what applies it."""

    name: str
    kinds: Collection[str]
    ledger: Ledger[Any]
    applied: Applied[Any]

    def stamp(self) -> object:
        """Return what differs after every change: a cheap check. Thread-safe; raises as ``Applied.read``."""
        return self.ledger.stamp, self.applied.also()


def watched_files(
    ledgers: Mapping[StateFile, Ledger[Any]],
    applied: Mapping[StateFile, Applied[Any]],
    kinds: Sequence[StateKind] = KINDS,
) -> Sequence[Watched]:
    """Return the files of ``kinds`` that are watched, each with what applies it.

    They come in the order of ``applied``: a later one may depend on an earlier one.

    Raises:
        KeyError: a file is missing from ``ledgers``.
        ValueError: a file is declared and not applied, or the other way round.
    """
    files = [file for file in files_of(kinds) if file.watched]
    if differing := {file for file in files if file.applied} ^ applied.keys():
        names = ", ".join(sorted(file.name for file in differing))
        raise ValueError(f"declared as applied, or applied, and not both: {names}")
    acts = {**applied, **{file: NOTHING_APPLIED for file in files if not file.applied}}
    return [Watched(file.name, kinds_in(file, kinds), ledgers[file], acts[file]) for file in acts]


@define(eq=False, repr=False)
class Watcher:
    """Watches ``files`` for one relay.

    A file may depend on those before it. ``sharing`` is told of every change; ``after_poll`` are called
    after each poll.

    Attributes:
        loop: the progress of ``run``.
    """

    _files: Sequence[Watched]
    _freshness: Freshness = field(kw_only=True)
    _sharing: Sharing = field(kw_only=True)
    _reserve: DescriptorReserve = field(kw_only=True)
    _after_poll: Sequence[Callable[[], None]] = field(kw_only=True)
    _log: FilteringBoundLogger = field(kw_only=True)
    _look_s: float = field(kw_only=True, default=LOOK_S)
    _poll_s: float = field(kw_only=True, default=POLL_S)
    loop: Loop = field(init=False, factory=Loop)
    _due: asyncio.Event = field(init=False, factory=asyncio.Event)
    _threads: LedgerThreads = field(init=False)
    _was_fresh: bool = field(init=False, default=True)
    # What no look since the last poll has found unchanged. Looks replace it, on their thread.
    _unsure: Sequence[Watched] = field(init=False)
    # The stamps of what was applied, and of what the other relays were told of.
    _seen: dict[str, object] = field(init=False, factory=dict)
    _shared: dict[str, object] = field(init=False, factory=dict)
    _read_errors: dict[str, str] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        # One for each file, and the one that looks at all of them.
        self._threads = LedgerThreads(self._reserve, len(self._files) + 1, "watch")
        self._unsure = self._files

    def begin(self) -> None:
        """Apply what was decided before the relay was started.

        Raises:
            StateError, OSError: it cannot be read. A relay that does not know the
                revocations must not run.
        """
        for file in self._files:
            stamp = file.stamp()
            file.applied.begin(file.applied.read())
            self._seen[file.name] = stamp
            self._freshness.read(file.name)
        self._freshness.read(SHARED)

    async def run(self) -> None:
        """Watch until cancelled."""
        ended = Event()
        wake = partial(asyncio.get_running_loop().call_soon_threadsafe, self._due.set)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(endless("ledgers", self._threads.run(lambda: self._look_until(ended, wake))))
            tasks.create_task(endless("shared ledgers", self._wake_when_written()))
            try:
                while True:
                    self.loop.busy(self._poll_s + _ROUND_S)
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self._poll_s):
                            await self._due.wait()
                    self._due.clear()
                    unsure, self._unsure = self._unsure, self._files
                    await self.poll(unsure)
            finally:
                ended.set()

    async def _wake_when_written(self) -> None:
        while True:
            await self._sharing.written(_ROUND_S)
            self._unsure = self._files
            self._due.set()

    def look(self) -> Sequence[Watched]:
        """Return the files that have changed since they were applied, or cannot be looked at.

        The others count as read; one of these does once a poll has applied it. Thread-safe.
        """
        if self._sharing.understands:
            self._freshness.read(SHARED)
        changed = []
        for file in self._files:
            with suppress(StateError, OSError):
                is_seen = self._reserve.run(file.stamp) == self._seen.get(file.name)
                if is_seen and file.name not in self._read_errors:
                    self._freshness.read(file.name)
                    continue
            changed.append(file)
        return changed

    def _look_until(self, ended: Event, wake: Callable[[], object]) -> None:
        while not ended.wait(self._look_s):
            self._unsure = self.look()
            if self._unsure:
                wake()

    async def poll(self, files: Sequence[Watched] | None = None) -> None:
        """Apply what has been decided in ``files``, or in all, since they were applied."""
        await asyncio.gather(*map(self._poll, self._files if files is None else files))
        if self._sharing.understands:
            self._freshness.read(SHARED)
        self._log_freshness()
        for act in self._after_poll:
            act()

    async def _poll(self, file: Watched) -> None:
        try:
            # The stamp first: a change during the read is found by the next poll.
            stamp = await self._threads.run(file.stamp)
            if stamp != self._seen[file.name]:
                if stamp != self._shared.get(file.name):
                    # Before it is applied here: the other relays need not wait for that.
                    self._sharing.changed(*file.kinds)
                    self._shared[file.name] = stamp
                file.applied.apply(await self._threads.run(file.applied.read))
                self._seen[file.name] = stamp
            self._freshness.read(file.name)
            self._read_errors.pop(file.name, None)
        except (StateError, OSError) as error:
            # What is in effect stays, and the next poll tries again; one line for each reason is enough.
            reason = printable(str(error))
            if reason != self._read_errors.get(file.name):
                self._log.error("a change cannot be read", what=file.name, reason=reason)
            self._read_errors[file.name] = reason

    def _log_freshness(self) -> None:
        is_fresh = self._freshness.is_fresh()
        if is_fresh is not self._was_fresh:
            self._was_fresh = is_fresh
            if is_fresh:
                self._log.info("the ledgers can be read again; calls are made")
            else:
                unread = {*self._read_errors, *(() if self._sharing.understands else (SHARED,))}
                self._log.error("the ledgers cannot be read; calls are refused", unread=sorted(unread))
