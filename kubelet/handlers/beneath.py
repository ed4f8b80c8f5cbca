"""Opens what lies beneath the directories that a board's owner names, and nothing outside of them.

The kernel resolves a path within its directory (``openat2``), so that no link and no ``..`` leaves it. What
is found is looked at before it is opened to be read: opening a device can act, and opening a FIFO can wait.
What belongs to the daemon or to the kernel is known by device and inode, so that a hard link or a bind mount
of it is no way to it. Must not be called on the event loop: a file system may not answer.
"""

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

KERNELS_OWN = ("/proc", "/sys", "/dev", "/run")
_PSEUDO = frozenset(
    {
        "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "devtmpfs", "efivarfs", "fusectl",
        "hugetlbfs", "mqueue", "proc", "pstore", "securityfs", "selinuxfs", "sysfs", "tracefs",
    }
)  # fmt: skip
"""Types of file systems that show the kernel's state, wherever one is mounted."""
_MOST_OWN = 50_000
_DEEPEST = 128

_OPENAT2 = 437  # on every architecture, as all system calls since Linux 5.0
_RESOLVE_NO_MAGICLINKS, _RESOLVE_BENEATH = 0x02, 0x08
_MOST_TRIES = 8
"""Where something is renamed meanwhile, the kernel cannot tell whether a ``..`` in a link leaves."""
_OUTSIDE = frozenset({errno.EXDEV, errno.ELOOP})

Inode = tuple[int, int]
"""Device and inode of a file or directory."""


class OutsideError(Exception):
    """What was named is outside of the directories, or is kept back. Also where it may not exist."""


def open_beneath(directory: int, path: str) -> int:
    """Return a descriptor of ``path`` in ``directory``, by which it can be looked at and not read.

    Raises:
        OutsideError: a link or ``..`` leads out of the directory.
        OSError: it is not there, or the kernel is older than Linux 5.6.
    """
    import ctypes  # noqa: PLC0415 - memory of nodes that show no file

    # struct open_how: flags, mode and resolve, 64 bits each.
    how = (ctypes.c_uint64 * 3)(os.O_PATH | os.O_CLOEXEC, 0, _RESOLVE_BENEATH | _RESOLVE_NO_MAGICLINKS)
    libc = ctypes.CDLL(None, use_errno=True)
    number = errno.EAGAIN
    for _ in range(_MOST_TRIES):
        found: int = libc.syscall(
            ctypes.c_long(_OPENAT2),
            ctypes.c_int(directory),
            os.fsencode(path),
            ctypes.byref(how),
            ctypes.c_size_t(ctypes.sizeof(how)),
        )
        if found >= 0:
            return found
        number = ctypes.get_errno()
        if number != errno.EAGAIN:
            break
    if number in _OUTSIDE:
        raise OutsideError
    raise OSError(number, os.strerror(number))


class Beneath:
    """What lies beneath ``directories``, whose absolute paths the owner names.

    ``denies`` returns whether the owner keeps a path back; it is asked for the path that the kernel found,
    and for the owner's name of it, since a directory may be named by a link. ``own`` are the files and
    directories of the daemon.
    """

    def __init__(
        self, directories: Sequence[str], denies: Callable[[str], bool], own: Sequence[Path] = ()
    ) -> None:
        self.directories = tuple(os.path.normpath(each) for each in directories)
        self._denies = denies
        self._named = self._found = Path("/")  # the directory that was looked into last, and where it is
        self._kept_back = frozenset(_inodes(own))
        self._devices = frozenset(_pseudo_devices())

    @contextmanager
    def opened(self, path: str, kind: Callable[[int], bool]) -> Iterator[int]:
        """Open ``path`` to be read, if ``kind`` accepts its mode.

        Raises:
            OutsideError: it is outside of the directories, or kept back.
            OSError: it is not there, cannot be read, or is of another kind (ENOENT).
        """
        place = self._looked_at(path)
        try:
            if not kind(os.fstat(place).st_mode):
                raise FileNotFoundError(errno.ENOENT, "of another kind")
            reading = os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        finally:
            os.close(place)
        try:
            yield reading
        finally:
            os.close(reading)

    def shows(self, directory: int, name: str) -> bool:
        """Return whether the owner lets ``name`` in the open ``directory`` be seen."""
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        return not self._is_denied(_path_of(directory) / name) and not self._is_kept_back(found)

    def _looked_at(self, path: str) -> int:
        base = self._base(path)
        relative = os.path.relpath(path, base)
        root = os.open(base, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._named, self._found = Path(base), _path_of(root)
            try:
                place = open_beneath(root, relative)
            except OSError:
                self._check_parents(root, relative)
                raise
        finally:
            os.close(root)
        try:
            self._check(place)
        except BaseException:
            os.close(place)
            raise
        return place

    def _base(self, path: str) -> str:
        """Return the directory of the owner's that ``path`` lies in, by its name.

        Raises:
            OutsideError: it lies in none, or the owner keeps it back.
        """
        parts = path.split("/")
        if parts[0] or not {".", ".."}.isdisjoint(parts) or self._denies(os.path.normpath(path)):
            raise OutsideError
        for base in self.directories:
            if path == base or path.startswith(base.rstrip("/") + "/"):
                return base
        raise OutsideError

    def _check_parents(self, root: int, relative: str) -> None:
        """See that what is missing would have been shown, so that a refusal does not tell what exists."""
        for above in Path(relative).parents:
            try:
                parent = open_beneath(root, str(above))
            except OSError:
                continue
            try:
                self._check(parent)
            finally:
                os.close(parent)
            return

    def _check(self, place: int) -> None:
        """See that what is open is not kept back, nor any directory that it lies in.

        Raises:
            OutsideError: it is.
            OSError: it is not there any more: of what was removed the kernel has no path to judge by.
        """
        path, found = _path_of(place), os.fstat(place)
        if not os.path.samestat(path.lstat(), found):
            raise FileNotFoundError(errno.ENOENT, "another is in its place")
        above = path if stat.S_ISDIR(found.st_mode) else path.parent
        if self._is_denied(path) or self._is_kept_back(found):
            raise OutsideError
        directory = os.open(above, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for _ in range(_DEEPEST):
                here = os.fstat(directory)
                if (here.st_dev, here.st_ino) in self._kept_back:
                    raise OutsideError
                parent = os.open("..", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
                os.close(directory)
                directory = parent
                if os.path.samestat(os.fstat(directory), here):
                    return
        finally:
            os.close(directory)
        raise OutsideError

    def _is_denied(self, path: Path) -> bool:
        within = path.relative_to(self._found) if path.is_relative_to(self._found) else path
        return any(self._denies(str(each)) for each in {path, self._named / within})

    def _is_kept_back(self, found: os.stat_result) -> bool:
        return (found.st_dev, found.st_ino) in self._kept_back or found.st_dev in self._devices


def _path_of(descriptor: int) -> Path:
    """Return the path of what is open, as the kernel knows it, without links."""
    return Path(f"/proc/self/fd/{descriptor}").readlink()


def _inodes(own: Sequence[Path]) -> Iterator[Inode]:
    """Yield the inodes of the kernel's directories, and of all that is in ``own``.

    Raises:
        OutsideError: there is too much of it to be told apart from what may be read.
    """
    pending = [*map(Path, KERNELS_OWN), *own]
    seen: set[Inode] = set()
    while pending:
        path = pending.pop()
        try:
            found = path.lstat()
            inode = found.st_dev, found.st_ino
            if inode in seen:
                continue
            if stat.S_ISLNK(found.st_mode):
                pending.append(path.resolve(strict=True))
            elif stat.S_ISDIR(found.st_mode) and str(path) not in KERNELS_OWN:
                pending += path.iterdir()
        except OSError:
            continue
        seen.add(inode)
        if len(seen) > _MOST_OWN:
            raise OutsideError
        yield inode


def _pseudo_devices() -> Iterator[int]:
    with Path("/proc/self/mountinfo").open(encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            left, _, right = line.partition(" - ")
            if right.split(" ", 1)[0] in _PSEUDO:
                major, minor = left.split()[2].split(":")
                yield os.makedev(int(major), int(minor))
