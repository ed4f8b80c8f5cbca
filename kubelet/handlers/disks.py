"""The list of this node's disks, kept fresh although any one of them may hang.

Reading the space of a dead disk can block without end, so disks are read in threads; one that does not
return keeps its last numbers, and is not read again until it does. A system without a thread to spare costs
the readings of this round. Must not touch a disk on the event loop.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, TypeVar

from structlog.typing import FilteringBoundLogger

from schemas.strict_json import MAX_SAFE_INTEGER
from schemas.text import printable

T = TypeVar("T")

MAX_THREADS = 16


class Mount(NamedTuple):
    """A file system where it is mounted. All three strings are of foreign origin."""

    device: str
    path: str
    fs_type: str


class Space(NamedTuple):
    """Bytes of a file system, and how many of them are free for an unprivileged user."""

    total: int
    available: int


def start_daemon_thread(work: Callable[[], None]) -> None:
    """Start a thread that does not keep the process from ending.

    Raises:
        RuntimeError: the system has none left.
    """
    threading.Thread(target=work, name="disk", daemon=True).start()


class DaemonThreadPool:
    """At most ``limit`` threads, which ``start`` starts; each ends when no call is queued."""

    def __init__(
        self, start: Callable[[Callable[[], None]], None] = start_daemon_thread, limit: int = MAX_THREADS
    ) -> None:
        self._start = start
        self._limit = limit
        self._lock = threading.Lock()
        self._jobs: deque[Callable[[], None]] = deque()
        self._running = 0

    def submit(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Return what ``call`` will return or raise once a thread takes it, which ``start_missing`` starts.

        Dropped when the loop has closed meanwhile.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def work() -> None:
            try:
                settle = partial(future.set_result, call())
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the awaiting side's
                settle = partial(future.set_exception, error)
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(lambda: None if future.done() else settle())

        self._jobs.append(work)
        return future

    def start_missing(self) -> None:
        """Start a thread for every queued call, up to the limit.

        Raises:
            RuntimeError: the system has none left. Queued calls wait for threads that run, or the next time.
        """
        for _ in range(min(len(self._jobs), self._limit)):
            with self._lock:
                if self._running == self._limit:
                    return
                self._running += 1
            try:
                self._start(self._work)
            except RuntimeError:
                with self._lock:
                    self._running -= 1
                raise

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._running -= 1
                    return
                job = self._jobs.popleft()
            job()


INTERVAL_S = 15.0
TIMEOUT_S = 0.5
MAX_DISKS = 64
MAX_MOUNT = 256
MAX_FS_TYPE = 32

# Images that are always full: sysinfo leaves them out too, and a desktop has dozens.
_IMAGES = frozenset({"squashfs", "iso9660"})


class Disk(NamedTuple):
    """One disk as a sample shows it."""

    mount: str
    fs_type: str
    total_bytes: int
    available_bytes: int


def distinct(mounts: Iterable[Mount]) -> list[Mount]:
    """Return the first mount of each device, at most MAX_DISKS.

    Bind mounts, a sandbox's among them, and btrfs subvolumes show one device in several places.
    """
    first: dict[str, Mount] = {}
    for mount in mounts:
        if mount.fs_type not in _IMAGES:
            first.setdefault(mount.device, mount)
    return list(first.values())[:MAX_DISKS]


def disk_of(mount: Mount, space: Space) -> Disk:
    """Return the disk at ``mount``. The owner of a plugged-in disk chooses its name, and its sizes too."""
    total = min(max(space.total, 0), MAX_SAFE_INTEGER)
    return Disk(
        mount=printable(mount.path, MAX_MOUNT),
        fs_type=printable(mount.fs_type, MAX_FS_TYPE),
        total_bytes=total,
        available_bytes=min(max(space.available, 0), total),
    )


class Disks:
    """Keeps the last list.

    ``mounts`` and ``space`` are called in ``threads``, and may never return.

    Attributes:
        first: set when every disk has been read once, whether that returned or not.
    """

    def __init__(  # noqa: PLR0913 - what comes in from outside
        self,
        mounts: Callable[[], Sequence[Mount]],
        space: Callable[[str], Space],
        log: FilteringBoundLogger,
        *,
        threads: DaemonThreadPool | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._mounts = mounts
        self._space = space
        self._log = log
        self._threads = threads or DaemonThreadPool()
        self._sleep = sleep
        self._timeout_s = timeout_s
        self._mounted: list[Mount] = []
        self._known: dict[Mount, Disk] = {}
        self._pending: dict[Mount, asyncio.Future[Space]] = {}
        self._pending_mounts: asyncio.Future[Sequence[Mount]] | None = None
        self._short_of_threads = False
        self.first = asyncio.Event()

    @property
    def latest(self) -> list[Disk] | None:
        """The disks whose reading returned, in the order of mounting; None before the first round."""
        disks = [self._known[mount] for mount in self._mounted if mount in self._known]
        return disks if disks or self.first.is_set() else None

    async def run(self) -> None:
        while True:
            await self.refresh()
            await self._sleep(INTERVAL_S)

    async def refresh(self) -> None:
        """Read every disk whose last reading has returned, and wait for the results up to the timeout."""
        await self._read_mounts()
        self._known = {mount: disk for mount, disk in self._known.items() if mount in self._mounted}
        for mount in self._mounted:
            if mount not in self._pending:
                self._pending[mount] = self._threads.submit(partial(self._space, mount.path))
                self._pending[mount].add_done_callback(partial(self._answered, mount))
        self._start_threads()
        if self._pending:
            await asyncio.wait(self._pending.values(), timeout=self._timeout_s)
        self.first.set()

    async def _read_mounts(self) -> None:
        if self._pending_mounts is None:
            self._pending_mounts = self._threads.submit(self._mounts)
        self._start_threads()
        await asyncio.wait((self._pending_mounts,), timeout=self._timeout_s)
        if not self._pending_mounts.done():
            return
        # A table of mounts that cannot be read now leaves the last list in place.
        with suppress(OSError):
            self._mounted = distinct(self._pending_mounts.result())
        self._pending_mounts = None

    def _start_threads(self) -> None:
        try:
            self._threads.start_missing()
        except RuntimeError as error:
            if not self._short_of_threads:
                self._log.warning("disks are not read", reason=printable(str(error)))
            self._short_of_threads = True
        else:
            self._short_of_threads = False

    def _answered(self, mount: Mount, answer: asyncio.Future[Space]) -> None:
        del self._pending[mount]
        try:
            self._known[mount] = disk_of(mount, answer.result())
        except OSError:
            # Unmounted in between, or broken: its old numbers would be wrong.
            self._known.pop(mount, None)
