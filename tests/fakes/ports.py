"""Ports of the loopback address for what a test starts a moment later.

A port that was bound and released can be given to any outgoing connection before it is used: the kernel takes
those from the ephemeral range. These are below it, and below those that demos take. Each test process begins
at another one, so that no other worker and no other run of the tests chooses the same.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from functools import cache

_FIRST, _END = 10_000, 20_000
_APART = 61
"""Processes with neighbouring numbers begin this far from each other."""


def unused_port() -> int:
    """Return a port on which no process listens, and which this process has not returned before."""
    for port in _candidates():
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free on the loopback address")


@cache
def _candidates() -> Iterator[int]:
    count = _END - _FIRST
    start = os.getpid() * _APART
    return (_FIRST + (start + step) % count for step in range(count))
