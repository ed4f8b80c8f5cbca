"""The socket's file: bound where it should be, replaced only if it is stale, readable by its group alone.

And who has connected, by the kernel's word. The file's mode keeps others out already; ``Peer`` holds where a
descriptor was passed on, or the mode was changed. Must not accept a connection, nor read what is sent.
"""

import errno
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from schemas.error_roots import OperatorError
from schemas.files import MAX_SOCKET_PATH_BYTES, fits_socket

_FOR_THE_GROUP = 0o660
_PRIVATE = 0o600
_GROUP_DIRECTORY = 0o750
_OTHERS_WRITE = 0o022
_BACKLOG = 64
_ROOT = 0
_CREDENTIALS = struct.Struct("iII")
_SO_PEERGROUPS = 59  # not in Python's socket module
_MAX_GROUPS = 256  # of which Python reads no more
_GROUP = struct.Struct("I")


class SocketFileError(OperatorError):
    """The socket cannot be made; the text names its path and states what to do."""


@dataclass(frozen=True, slots=True)
class BoundSocket:
    """A socket that listens. ``group`` may use it beside its user and root; None if no group may."""

    listener: socket.socket
    group: int | None


@contextmanager
def bind_socket(path: Path, group: int | None) -> Iterator[BoundSocket]:
    """Hold a socket that listens at ``path``; its file is removed at the end.

    ``group`` may use it if this user can give it to that group.

    Raises:
        SocketFileError: the path is too long, or taken, or its directory is not to be trusted.
        OSError: it cannot be made.
    """
    if not fits_socket(path):
        raise SocketFileError(f"the socket's path is longer than {MAX_SOCKET_PATH_BYTES} bytes: {path}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        _make_directory(path.parent, group)
        with _locked(path.parent):
            _remove_stale(path)
            listener.bind(os.fspath(path))
        made = path.lstat()
        try:
            given = _give(path, group)
            path.chmod(_PRIVATE if given is None else _FOR_THE_GROUP)
            # Not before: until now a connection would have been made by the process's umask.
            listener.listen(_BACKLOG)
            yield BoundSocket(listener, given)
        finally:
            _remove_own(path, made)
    finally:
        listener.close()


def _make_directory(directory: Path, group: int | None) -> None:
    """Make the directory, which the service manager has made already for a service; not those above it."""
    if not directory.exists() and directory.parent.is_dir():
        directory.mkdir(_GROUP_DIRECTORY)
        _give(directory, group)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Keep another daemon from replacing a file of ``directory`` meanwhile.

    Raises:
        SocketFileError: others can put files there, or it is no directory.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise SocketFileError(f"{directory} is no directory: make it, or name another --socket") from None
    try:
        facts = os.fstat(descriptor)
        is_open = bool(facts.st_mode & _OTHERS_WRITE) and not facts.st_mode & stat.S_ISVTX
        if is_open or facts.st_uid not in {os.geteuid(), _ROOT}:
            raise SocketFileError(f"others can change {directory}: name another --socket")
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_stale(path: Path) -> None:
    try:
        facts = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(facts.st_mode):
        raise SocketFileError(f"{path} is no socket: remove it, or name another --socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        probe.settimeout(0)
        error = probe.connect_ex(os.fspath(path))
    if error != errno.ECONNREFUSED:
        raise SocketFileError(f"another process listens at {path}: stop it, or name another --socket")
    path.unlink()


def _give(path: Path, group: int | None) -> int | None:
    """Give ``path`` to the group; return it, or None if there is none or this user is no member."""
    if group is None:
        return None
    if path.lstat().st_gid == group:
        return group  # a service's files have its group, and its sandbox denies chown
    try:
        os.chown(path, -1, group)
    except PermissionError:
        return None
    return group


def _remove_own(path: Path, made: os.stat_result) -> None:
    with suppress(FileNotFoundError):
        facts = path.lstat()
        if (facts.st_dev, facts.st_ino) == (made.st_dev, made.st_ino):
            path.unlink()


@dataclass(frozen=True, slots=True)
class Peer:
    """The process that has connected, as it was at that moment."""

    pid: int
    uid: int
    gid: int
    groups: frozenset[int] = frozenset()

    def may_use(self, group: int | None) -> bool:
        """Return whether this is the daemon's own user, root, or a member of ``group``."""
        if self.uid in {os.geteuid(), _ROOT}:
            return True
        return group is not None and (self.gid == group or group in self.groups)


def peer_of(connection: socket.socket) -> Peer:
    """Return the process at the other end of ``connection``.

    Raises:
        OSError: the kernel does not name it.
    """
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    return Peer(pid, uid, gid, _groups_of(connection))


def _groups_of(connection: socket.socket) -> frozenset[int]:
    """Return the supplementary groups of the other end; none if they are too many to read."""
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MAX_GROUPS * _GROUP.size)
    except OSError:
        return frozenset()
    return frozenset(number for (number,) in _GROUP.iter_unpack(raw))
