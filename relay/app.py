"""The relay's composition root: the one place where its parts meet the clock, the disk and the network.

Must not hold behaviour of its own.
"""

import asyncio
import contextlib
import gc
import logging
import os
import socket
import time
from collections.abc import Iterator
from importlib.metadata import version
from typing import TextIO

import uvicorn
from starlette.types import ASGIApp
from structlog.typing import FilteringBoundLogger

from relay.admission import Admission
from relay.audit import AuditLog
from relay.auth import Authenticator, key_id, load_or_create_token_key
from relay.ca import CertificateAuthority
from relay.calls import Door
from relay.catalog import Projector
from relay.config import RelayConfig
from relay.discovery import Discovery
from relay.fleet import Fleet, Trust
from relay.guard import AllowedHosts, Guard
from relay.http import make_routes
from relay.logs import make_logger
from relay.marks import MarkStore
from relay.mcp_server import McpServer
from relay.meters import Meters
from relay.notifier import Notifier
from relay.resources import ResourceCatalog
from relay.sessions import NodeSessions
from relay.tally import Tally
from relay.transport import BoundedHttp, BoundedWebSocket
from schemas.addresses import HostPort, mcp_url
from schemas.frames import MAX_FRAME_BYTES, FrameReader
from schemas.kinds import KindRegistry
from schemas.registry import SchemaRegistry
from schemas.tokens import AGENT_REF, DEVICE_REF, TokenVerifier
from schemas.trust import TrustRules
from schemas.ulids import UlidSource

_PING_INTERVAL_S = 15
_PING_TIMEOUT_S = 10
_SHUTDOWN_S = 3


def now_ms() -> int:
    """Return the system's time in milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


class Relay:
    """The parts of one relay, put together.

    ``registry`` and ``kinds`` are the documents and kinds that it knows, by default those that ship.

    Raises:
        AuthorityError: there is no CA.
        ExposedFileError: others can read the token key.
        OSError: the state directory cannot be used.
    """

    def __init__(
        self,
        config: RelayConfig,
        log: FilteringBoundLogger,
        registry: SchemaRegistry | None = None,
        kinds: KindRegistry | None = None,
    ) -> None:
        registry, kinds, meters = registry or SchemaRegistry(), kinds or KindRegistry(), Meters()
        ulids = UlidSource(now_ms, os.urandom)
        state = config.state
        ca = CertificateAuthority(state.ca, now_ms, os.urandom)
        # First of all, for this error says what to do.
        trust = Trust(TrustRules(registry, kinds), [ca.root_pem()], ca.revoked_kids())
        self.marks = MarkStore(state.marks)
        self.audit = AuditLog(state.audit, now_ms)
        self.tally = Tally(self.audit, log)
        fleet = Fleet(
            trust=trust,
            projector=Projector(registry, kinds),
            marks=self.marks,
            meters=meters,
            tally=self.tally,
            now_ms=now_ms,
            log=log,
        )
        token_key = bytes(load_or_create_token_key(state.token_key).verify_key)
        authenticator = Authenticator(
            TokenVerifier(registry, AGENT_REF),
            {key_id(token_key): token_key},
            issuer=config.public_url,
            audience=mcp_url(config.public_url),
            now_ms=now_ms,
        )
        device_tokens = TokenVerifier(registry, DEVICE_REF)
        sessions = NodeSessions(
            admission=Admission(fleet, device_tokens, config.public_url, now_ms, os.urandom),
            fleet=fleet,
            reader=FrameReader(registry),
            ulids=ulids,
            meters=meters,
            tally=self.tally,
            now_ms=now_ms,
            log=log,
        )
        door = Door(
            authenticator=authenticator,
            fleet=fleet,
            reach=sessions,
            audit=self.audit,
            meters=meters,
            ulids=ulids,
            monotonic=time.monotonic,
            log=log,
        )
        self.notifier = Notifier(fleet)
        self.discovery = Discovery(
            broker=config.broker,
            # Not the process id: in containers that is often 1, and a broker keeps one of two alike.
            client_id=f"edge-relay-{os.urandom(4).hex()}",
            fleet=fleet,
            registry=registry,
            meters=meters,
            log=log,
        )
        mcp = McpServer(
            version=version("edge-kubelet"),
            door=door,
            fleet=fleet,
            authenticator=authenticator,
            notifier=self.notifier,
            resources=ResourceCatalog(fleet, registry),
            now_ms=now_ms,
        )
        self.application = Guard(
            allowed=AllowedHosts.of(config.public_url, config.listen),
            authenticator=authenticator,
            public_url=config.public_url,
            meters=meters,
            tally=self.tally,
            mcp=mcp,
            node_door=sessions,
            other=make_routes(
                public_url=config.public_url,
                registry=registry,
                meters=meters,
                readiness=lambda: {
                    "broker": self.discovery.connected,
                    "audit": self.audit.available,
                },
                running=mcp.running,
            ),
        )


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: who runs the relay decides when it ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def run_relay(
    config: RelayConfig,
    listener: socket.socket,
    stream: TextIO,
    registry: SchemaRegistry | None = None,
    kinds: KindRegistry | None = None,
) -> None:
    """Serve on ``listener``, which is bound, until cancelled. ``registry`` and ``kinds`` are ``Relay``'s.

    Raises:
        AuthorityError, ExposedFileError, OSError: as ``Relay``.
    """
    log = make_logger(stream)
    # What the libraries have to say is for their developers; what an operator needs is in our own log.
    logging.getLogger("mcp").setLevel(logging.CRITICAL)
    relay = Relay(config, log, registry, kinds)
    _calm_collector()
    log.info("relay started", url=config.public_url, listen=str(config.listen), broker=str(config.broker))
    try:
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(work.run())
                for work in (relay.marks, relay.tally, relay.notifier, relay.discovery)
            ]
            try:
                await serve(relay.application, listener)
            finally:
                for task in background:
                    task.cancel()
    finally:
        relay.audit.close()


def _calm_collector() -> None:
    """Make the garbage collector look less often at what stays.

    Thousands of nodes are a large heap that does not change, and every call leaves a few cycles behind in
    the SDK. With the default thresholds the collector walks the whole heap so often that calls take nearly
    half as long again; with these, a few megabytes of garbage wait a little longer.
    """
    gc.freeze()
    gc.set_threshold(10_000, 20, 100)


async def serve(application: ASGIApp, listener: socket.socket) -> None:
    """Serve ``application`` on ``listener``, which is bound, until cancelled."""
    server = _Server(
        uvicorn.Config(
            application,
            http=BoundedHttp,
            ws=BoundedWebSocket,
            ws_max_size=MAX_FRAME_BYTES,
            ws_ping_interval=_PING_INTERVAL_S,
            ws_ping_timeout=_PING_TIMEOUT_S,
            ws_per_message_deflate=False,
            log_config=None,
            log_level=logging.CRITICAL,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=_SHUTDOWN_S,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        server.should_exit = True
        await serving
        raise


def bind(listen: HostPort) -> socket.socket:
    """Return a listening socket.

    Raises:
        OSError: the port is taken, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((listen.host, listen.port))
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {listen}: {os.strerror(error.errno or 0)}") from None
    return listener
