"""Ports of the loopback address for what a test starts a moment later.

A port of the ephemeral range can be given to any outgoing connection before it is used. These are below it,
and below those that demos take. Each test process begins at another one, so that no other worker and no other
run of the tests chooses the same.
"""

import os
import socket
from collections.abc import Iterator
from errno import ECONNREFUSED
from functools import cache

_FIRST, _END = 10_000, 20_000
_APART = 3_819
"""The golden section: processes whose numbers are near begin far from each other."""
_ANSWER_S = 1


def unused_port() -> int:
    """Return a port on which no process listens, and which this process has not returned before."""
    for port in _candidates():
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.settimeout(_ANSWER_S)
            if probe.connect_ex(("127.0.0.1", port)) == ECONNREFUSED:
                return port
    raise AssertionError("no port is free on the loopback address")


@cache
def _candidates() -> Iterator[int]:
    count = _END - _FIRST
    start = os.getpid() * _APART
    return (_FIRST + (start + step) % count for step in range(count))
