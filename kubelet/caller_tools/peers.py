"""Who is at the other end of the socket, by the kernel's word, and whether that user may be.

The file's mode keeps others out already; this holds where a descriptor was passed on, or the mode was
changed. Must not read anything that a client sends.
"""

import os
import socket
import struct
from dataclasses import dataclass

_CREDENTIALS = struct.Struct("iII")
_SO_PEERGROUPS = 59  # not in Python's socket module
_MAX_GROUPS = 256  # of which Python reads no more
_GROUP = struct.Struct("I")
_ROOT = 0


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
