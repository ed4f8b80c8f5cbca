"""Ports of the loopback address for the parts of a demo, which bind them a moment later.

A port that was free a moment ago can be taken by another demo that starts at the same time: each claims its
ports by a name that can be bound once on a machine. The usual port is taken where it is free, else one below
the range from which the kernel serves outgoing connections. Must not start anything.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import Self

from schemas.error_roots import OperatorError

_FIRST, _END = 20_000, 32_000
_APART = 61
"""Processes with neighbouring numbers begin this far from each other."""


class NoPortError(OperatorError):
    """No port of the loopback address is free."""


class ClaimedPorts:
    """The ports of one demo, claimed until it ends. A context."""

    def __init__(self) -> None:
        self._claims: list[socket.socket] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for claim in self._claims:
            claim.close()

    def take(self, wanted: int | None = None) -> int:
        """Return ``wanted`` if it is given and free, else another port.

        Raises:
            NoPortError: no port is free.
        """
        for port in (*([] if wanted is None else [wanted]), *_others()):
            if self._claim(port):
                if _is_free(port):
                    return port
                self._claims.pop().close()
        raise NoPortError("no port is free on the loopback address")

    def _claim(self, port: int) -> bool:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # In the abstract namespace: it ends with the process, and leaves no file.
            claim.bind(f"\0edge-kubelet-demo-port-{port}")
        except OSError:
            claim.close()
            return False
        self._claims.append(claim)
        return True


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe, suppress(OSError):
        # As servers do: a port whose last connections are closing is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
        return True
    return False


def _others() -> Iterator[int]:
    count = _END - _FIRST
    start = os.getpid() * _APART
    return (_FIRST + (start + step) % count for step in range(count))
