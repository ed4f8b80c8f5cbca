"""What the link to the relay works with. Must not use it."""

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from structlog.typing import FilteringBoundLogger

from kubelet.announce.announcer import Announcer
from kubelet.dispatch import Dispatcher
from kubelet.session.relay_addresses import RelayAddresses
from kubelet.session.relay_frames import RelayFrames
from kubelet.session.renewal import Renewal
from schemas.frames import FrameReader
from schemas.identity_files import NodeIdentity
from schemas.ulids import UlidSource

_HANDSHAKE_TIMEOUT_S = 10.0


def ticks_ms() -> int:
    """Return milliseconds that only go forward."""
    return time.monotonic_ns() // 1_000_000


@dataclass(frozen=True, slots=True)
class LinkParts:
    """What a link works with.

    Attributes:
        public_url: of the fleet. It is the audience that this node has pinned, whichever relay it reaches.
        relays: the addresses of the fleet's relays.
        frames: the one-way frames, which survive a connection.
        tls: how the relay is verified; None where the connection is not over TLS.
        renewal: renews the leaf; None for a node that has no files.
        ticks_ms: milliseconds that only ever go forward. They measure how long a command was on its way: the
            clock of a board without a battery leaps when it is set, and every command would look late.
    """

    identity: NodeIdentity
    public_url: str
    relays: RelayAddresses
    reader: FrameReader
    announcer: Announcer
    dispatcher: Dispatcher
    frames: RelayFrames
    ulids: UlidSource
    log: FilteringBoundLogger
    ticks_ms: Callable[[], int] = ticks_ms
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    tls: Callable[[], ssl.SSLContext | None] = lambda: None
    renewal: Renewal | None = None
    handshake_timeout_s: float = _HANDSHAKE_TIMEOUT_S
    monotonic: Callable[[], float] = time.monotonic
