"""Applies what the operator decides while the relay runs, and knows whether it can be known.

The commands write ledgers, which are looked at four times a second: that costs less than a way into this
process. One thread looks, and wakes the event loop when a file has changed: an idle relay would do little
else. Whatever that thread finds, all are polled once a second. They are read on threads of their own: with
thousands of nodes that takes a while, and calls go on.
A relay that cannot read a ledger cannot know of a revocation, nor that a label now is another node's, so it
must refuse calls. A disk that hangs raises no error, so the age of the last successful read counts. The
thread counts ledgers that have not changed, however busy the event loop is. Must not know what a ledger says.
"""

import asyncio
import errno
import math
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Event, Lock
from typing import Any, Generic, Protocol, TypeVar

from attrs import define, field
from structlog.typing import FilteringBoundLogger

from relay.state.sharer import Sharing
from schemas.error_roots import StateError
from schemas.health import Health, Loop, endless
from schemas.process.prestarted_pool import prestarted_pool
from schemas.text import printable

LOOK_S = 0.25
"""How often the ledgers are looked at."""
POLL_S = 1.0
"""How often they are polled, changed or not."""
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


@dataclass(frozen=True, slots=True)
class Watched(Generic[ContentT]):
    """A file of what was decided, and what applies it.

    Attributes:
        name: the file's.
        kinds: of its entries, those that relays of a fleet share.
        stamp: returns what differs after every change: a cheap check. Thread-safe. As ``read``, raises
            StateError or OSError where that cannot be found out.
        read: returns what the file says. Runs on a thread.
        begin: applies what was decided before the relay was started, and is on record.
        apply: applies what was decided since, and records it.
    """

    name: str
    kinds: Collection[str]
    stamp: Callable[[], object]
    read: Callable[[], ContentT]
    begin: Callable[[ContentT], object]
    apply: Callable[[ContentT], object]


@define(eq=False, repr=False)
class Watcher:
    """Watches ``files`` for one relay.

    A file may depend on those before it. ``sharing`` is told of every change; ``after_poll`` are called
    after each poll.

    Attributes:
        loop: the progress of ``run``.
    """

    _files: Sequence[Watched[Any]]
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
    # The stamps of what was applied, and of what the other relays were told of.
    _seen: dict[str, object] = field(init=False, factory=dict)
    _shared: dict[str, object] = field(init=False, factory=dict)
    _read_errors: dict[str, str] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        # One for each file, and the one that looks at all of them.
        self._threads = LedgerThreads(self._reserve, len(self._files) + 1, "watch")

    def begin(self) -> None:
        """Apply what was decided before the relay was started.

        Raises:
            StateError, OSError: it cannot be read. A relay that does not know the
                revocations must not run.
        """
        for file in self._files:
            stamp = file.stamp()
            file.begin(file.read())
            self._seen[file.name] = stamp
            self._freshness.read(file.name)
        self._freshness.read(SHARED)

    async def run(self) -> None:
        """Poll until cancelled."""
        ended = Event()
        wake = partial(asyncio.get_running_loop().call_soon_threadsafe, self._due.set)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(endless("ledgers", self._threads.run(lambda: self._look_until(ended, wake))))
            tasks.create_task(endless("shared ledgers", self._wake_when_written()))
            try:
                while True:
                    self.loop.busy(self._poll_s + _ROUND_S)
                    await self._due.wait()
                    self._due.clear()
                    await self.poll()
            finally:
                ended.set()

    async def _wake_when_written(self) -> None:
        while True:
            await self._sharing.written(self._poll_s)
            self._due.set()

    def confirm_unchanged(self) -> bool:
        """Count the files that are as they were when they were last applied; return whether all are.

        Of one that has changed, or cannot be looked at, only the poll that applies it counts. Thread-safe.
        """
        if self._sharing.understands:
            self._freshness.read(SHARED)
        changed = False
        for file in self._files:
            try:
                is_unchanged = self._reserve.run(file.stamp) == self._seen.get(file.name)
            except (StateError, OSError):
                is_unchanged = False
            if is_unchanged:
                self._freshness.read(file.name)
            else:
                changed = True
        return not changed

    def _look_until(self, ended: Event, wake: Callable[[], object]) -> None:
        while not ended.wait(self._look_s):
            if not self.confirm_unchanged():
                wake()

    async def poll(self) -> None:
        """Apply what has been decided since the last poll."""
        await asyncio.gather(*map(self._poll, self._files))
        if self._sharing.understands:
            self._freshness.read(SHARED)
        self._log_freshness()
        for act in self._after_poll:
            act()

    async def _poll(self, file: Watched[Any]) -> None:
        try:
            # The stamp first: a change during the read is found by the next poll.
            stamp = await self._threads.run(file.stamp)
            if stamp != self._seen[file.name]:
                if stamp != self._shared.get(file.name):
                    # Before it is applied here: the other relays need not wait for that.
                    self._sharing.changed(*file.kinds)
                    self._shared[file.name] = stamp
                file.apply(await self._threads.run(file.read))
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
