"""A file system of one directory, by FUSE, whose disk stalls and whose power is cut when a test says so.

It speaks the kernel's protocol itself, as a process of its own: a process that waits for its own file system
would wait for itself. A file's content is on the disk once the file is synced, its name once the directory
is. Lines on standard input: ``stall`` (writes and syncs of files do not return), ``resume``, and ``cut
DIRECTORY`` (writes what the disk holds there); each is answered by a line. It keeps no time, owner and mode.
"""

import errno
import os
import selectors
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import CDLL, get_errno
from pathlib import Path

import pytest

_ROOT, _BLOCK = 1, 4096
_IN, _OUT, _ATTR, _OPEN = struct.Struct("<IIQQIIII"), struct.Struct("<IiQ"), struct.Struct("<6Q10I"), "<QII"
_WRITE, _FSYNC, _RENAME2 = 16, 20, 45
_UNANSWERED = (2, 36, 42)  # forget, interrupt, batch of forget
_SIZE_VALID, _MOST_BYTES, _DETACH = 1 << 3, 1 << 17, 2


class _Disk:
    """What is in the files and on the disk."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._names: dict[bytes, int] = {}
        self._files: dict[int, bytearray] = {}
        self._synced_names: dict[bytes, int] = {}
        self._synced: dict[int, bytes] = {}
        self._stalls = False
        self._held: list[bytes] = []

    def command(self, line: str) -> None:
        word, _, directory = line.partition(" ")
        if word == "cut":
            for name, inode in self._synced_names.items():
                Path(directory, name.decode()).write_bytes(self._synced.get(inode, b""))
        self._stalls = word == "stall"
        held, self._held = self._held, []
        for request in held:
            self.take(request)

    def take(self, request: bytes) -> None:
        _, opcode, unique, node, *_ = _IN.unpack_from(request)
        if self._stalls and opcode in {_WRITE, _FSYNC}:
            self._held.append(request)
            return
        if opcode in _UNANSWERED:
            return
        try:
            answer, error = self._answer(opcode, node, request[_IN.size :]), 0
        except OSError as failed:
            answer, error = b"", -(failed.errno or errno.EIO)
        os.write(self._device, _OUT.pack(_OUT.size + len(answer), error, unique) + answer)

    def _answer(self, opcode: int, node: int, body: bytes) -> bytes:  # noqa: C901, PLR0911, PLR0912 - the protocol
        match opcode:
            case 26:  # init
                return struct.pack("<IIIIHHII9I", 7, 31, _MOST_BYTES, 0, 12, 10, _MOST_BYTES, 1, *[0] * 9)
            case 1:  # lookup
                return self._entry(self._inode(body[:-1]))
            case 3:  # getattr
                return struct.pack("<QII", 0, 0, 0) + self._attributes(node)
            case 4:  # setattr
                valid, _, _, size = struct.unpack_from("<IIQQ", body)
                if valid & _SIZE_VALID:
                    content = self._files[node]
                    content[size:] = bytes(max(0, size - len(content)))
                return struct.pack("<QII", 0, 0, 0) + self._attributes(node)
            case 10:  # unlink
                del self._names[self._known(body[:-1])]
                return b""
            case 12 | 45:  # rename
                old, new = body[16 if opcode == _RENAME2 else 8 :].split(b"\0")[:2]
                self._names[new] = self._names.pop(self._known(old))
                return b""
            case 14 | 27:  # open, opendir
                return struct.pack(_OPEN, 0, 0, 0)
            case 15:  # read
                _, offset, size = struct.unpack_from("<QQI", body)
                return bytes(self._files[node][offset : offset + size])
            case 16:  # write
                _, offset, size = struct.unpack_from("<QQI", body)
                self._files[node][offset : offset + size] = body[40 : 40 + size]
                return struct.pack("<II", size, 0)
            case 17:  # statfs
                return struct.pack(
                    "<5Q10I", 1 << 20, 1 << 20, 1 << 20, 1 << 20, 1 << 20, _BLOCK, 255, _BLOCK, *[0] * 7
                )
            case 20:  # fsync
                self._synced[node] = bytes(self._files[node])
                return b""
            case 30:  # fsyncdir
                self._synced_names = dict(self._names)
                return b""
            case 28:  # readdir
                _, offset, size = struct.unpack_from("<QQI", body)
                return self._listing(offset, size)
            case 35:  # create
                name = body[16:-1]
                self._names[name] = inode = len(self._files) + _ROOT + 1
                self._files[inode] = bytearray()
                return self._entry(inode) + struct.pack(_OPEN, 0, 0, 0)
            case 18 | 25 | 29:  # release, flush, releasedir
                return b""
        raise OSError(errno.ENOSYS, "not of this disk")

    def _known(self, name: bytes) -> bytes:
        self._inode(name)
        return name

    def _inode(self, name: bytes) -> int:
        if name not in self._names:
            raise OSError(errno.ENOENT, "no such file")
        return self._names[name]

    def _entry(self, inode: int) -> bytes:
        return struct.pack("<QQQQII", inode, 0, 0, 0, 0, 0) + self._attributes(inode)

    def _attributes(self, inode: int) -> bytes:
        is_file = inode != _ROOT
        mode = stat.S_IFREG | 0o600 if is_file else stat.S_IFDIR | 0o700
        links = int(inode in self._names.values()) if is_file else 2
        size = len(self._files[inode]) if is_file else 0
        times, nanoseconds = (0, 0, 0), (0, 0, 0)
        return _ATTR.pack(
            inode,
            size,
            size // 512,
            *times,
            *nanoseconds,
            mode,
            links,
            os.getuid(),
            os.getgid(),
            0,
            _BLOCK,
            0,
        )

    def _listing(self, offset: int, size: int) -> bytes:
        listing = b""
        for number, (name, inode) in enumerate(list(self._names.items())[offset:], offset + 1):
            entry = struct.pack("<QQII", inode, number, len(name), stat.S_IFREG >> 12) + name
            entry += bytes(-len(entry) % 8)
            if len(listing) + len(entry) > size:
                break
            listing += entry
        return listing


def _serve(place: str) -> None:
    libc = CDLL(None, use_errno=True)
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
    if libc.mount(b"disk", place.encode(), b"fuse", 0, options.encode()):
        sys.exit(os.strerror(get_errno()))
    disk, polled = _Disk(device), selectors.DefaultSelector()
    polled.register(device, selectors.EVENT_READ)
    polled.register(sys.stdin, selectors.EVENT_READ)
    print("mounted", flush=True)
    while True:
        for key, _ in polled.select():
            if key.fd == device:
                disk.take(os.read(device, 2 * _MOST_BYTES))
            elif line := sys.stdin.readline():
                disk.command(line.strip())
                print("done", flush=True)
            else:
                libc.umount2(place.encode(), _DETACH)
                return


class FuseDisk:
    """The disk as a test has it: its files are below ``path``."""

    def __init__(self, path: Path, process: "subprocess.Popen[str]") -> None:
        self.path = path
        self._process = process

    def stall(self) -> None:
        """Let no write and no sync return."""
        self._tell("stall")

    def resume(self) -> None:
        self._tell("resume")

    def cut_power(self, held: Path) -> Path:
        """Return the directory ``held``, which is made, with what is on the disk."""
        held.mkdir(mode=0o700)
        self._tell(f"cut {held}")
        return held

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"


@contextmanager
def fuse_disk(path: Path) -> Iterator[FuseDisk]:
    """Hold a disk that is mounted on ``path``, which is made; where none can be, the test is skipped."""
    path.mkdir(mode=0o700)
    command = [sys.executable, "-P", "-m", "tests.fakes.fuse_disk", str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if process.stdout.readline() != "mounted\n":
                pytest.skip("no FUSE file system can be mounted here: it takes root and /dev/fuse")
            yield FuseDisk(path, process)
        finally:
            process.stdin.close()


if __name__ == "__main__":
    _serve(sys.argv[1])
