"""The list of this node's disks, kept fresh although any one of them may hang.

Asking a dead disk for its space can block for ever, so every disk is asked in a thread of its own, and one
that does not answer keeps its last numbers and its one thread. They are daemon threads and not a pool's: a
pool is joined at exit, and a dead disk would keep the daemon from ending. Must not touch a disk on the event
loop.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, TypeVar

from kubelet.handlers.readings import Mount, Space
from schemas.strict_json import MAX_SAFE_INTEGER
from schemas.text import printable

T = TypeVar("T")

INTERVAL_S = 15.0
PATIENCE_S = 0.5
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


def described(mount: Mount, space: Space) -> Disk:
    """Return the disk at ``mount``. Whoever plugs in a stick chooses its name, and its sizes too."""
    total = min(max(space.total, 0), MAX_SAFE_INTEGER)
    return Disk(
        mount=printable(mount.path, MAX_MOUNT),
        fs_type=printable(mount.fs_type, MAX_FS_TYPE),
        total_bytes=total,
        available_bytes=min(max(space.available, 0), total),
    )


class Disks:
    """Keeps the last list.

    ``mounts`` and ``space`` are called in threads, and ``space`` may never come back.

    Attributes:
        first: set when every disk has been asked once, whether it answered or not.
    """

    def __init__(
        self,
        mounts: Callable[[], Sequence[Mount]],
        space: Callable[[str], Space],
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._mounts = mounts
        self._space = space
        self._sleep = sleep
        self._patience_s = patience_s
        self._mounted: list[Mount] = []
        self._known: dict[Mount, Disk] = {}
        self._asked: dict[Mount, asyncio.Future[Space]] = {}
        self.first = asyncio.Event()

    @property
    def latest(self) -> list[Disk] | None:
        """The disks that have answered, in the order of mounting; None while that is not known at all."""
        disks = [self._known[mount] for mount in self._mounted if mount in self._known]
        return disks if disks or self.first.is_set() else None

    async def run(self) -> None:
        """Refresh the list, for ever."""
        while True:
            await self.refresh()
            await self._sleep(INTERVAL_S)

    async def refresh(self) -> None:
        """Ask every disk that does not still owe an answer, and wait a little for the answers."""
        # A table of mounts that cannot be read now leaves the last list standing.
        with suppress(OSError):
            self._mounted = distinct(await _in_thread(self._mounts))
        self._known = {mount: disk for mount, disk in self._known.items() if mount in self._mounted}
        for mount in self._mounted:
            if mount not in self._asked:
                self._asked[mount] = _in_thread(partial(self._space, mount.path))
                self._asked[mount].add_done_callback(partial(self._answered, mount))
        if self._asked:
            await asyncio.wait(self._asked.values(), timeout=self._patience_s)
        self.first.set()

    def _answered(self, mount: Mount, answer: asyncio.Future[Space]) -> None:
        del self._asked[mount]
        try:
            self._known[mount] = described(mount, answer.result())
        except OSError:
            # Unmounted in between, or broken: its old numbers would be a lie.
            self._known.pop(mount, None)


def _in_thread(call: Callable[[], T]) -> asyncio.Future[T]:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def resolve(result: T) -> None:
        if not future.done():
            future.set_result(result)

    def reject(error: Exception) -> None:
        if not future.done():
            future.set_exception(error)

    def work() -> None:
        try:
            settle = partial(resolve, call())
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the awaiting side's
            settle = partial(reject, error)
        # The loop may have closed while a disk hung; then nobody wants to know any more.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(settle)

    threading.Thread(target=work, name="disk", daemon=True).start()
    return future
