"""The daemon's composition root: the one place where its parts meet the clock, the disk and the network.

The loopback server starts first and ends last, so that a node that is never accepted stays visible. Must not
hold behaviour of its own.
"""

import asyncio
import os
import random
from pathlib import Path
from typing import TextIO

from structlog.typing import FilteringBoundLogger

from kubelet.announce.hardware import read_hardware_ids
from kubelet.announce.mqtt import FIRST_WAIT_S, LONGEST_WAIT_S, MqttPublisher
from kubelet.backoff import Backoff
from kubelet.clock import now_ms
from kubelet.config import NodeConfig
from kubelet.daemon.node import Node, NodeEnvironment
from kubelet.daemon.prestarted_pool import prestarted_pool
from kubelet.handlers.base import Handler
from kubelet.handlers.echo import EchoHandler
from kubelet.handlers.metrics import MetricsHandler
from kubelet.lock import held_alone
from kubelet.logs import fatal_errors_logged, opened
from kubelet.loopback.pages import Readiness
from kubelet.loopback.server import LoopbackServer
from kubelet.session.link import LinkState
from kubelet.session.tls import NodeTls
from schemas.frames import FrameReader
from schemas.identity_files import IdentityFiles, NodeIdentity
from schemas.kinds import KindRegistry
from schemas.manifest import fingerprint
from schemas.registry import SchemaRegistry


def node_environment(
    config: NodeConfig, client_id: str, log: FilteringBoundLogger, files: IdentityFiles
) -> NodeEnvironment:
    """Return what nodes of this process share, with the system's clock and randomness.

    ``files``: whose root is trusted, if so configured, and whose leaf is presented to the broker.
    """
    tls = NodeTls(files, own_root=config.own_root)
    rng = random.Random(os.urandom(16))  # noqa: S311 - jitter, not a secret
    registry = SchemaRegistry()
    return NodeEnvironment(
        config=config,
        publisher=MqttPublisher(
            config.broker,
            client_id,
            log,
            Backoff(rng, FIRST_WAIT_S, LONGEST_WAIT_S),
            tls.to_broker(config.broker),
        ),
        registry=registry,
        reader=FrameReader(registry),
        kinds=KindRegistry(),
        now_ms=now_ms,
        random_bytes=os.urandom,
        rng=rng,
        log=log,
        relay_tls=lambda: tls.to_relay(config.relay_url),
    )


def make_handlers(node_id: str, log: FilteringBoundLogger) -> list[Handler]:
    """Return the handlers of this node. An explicit list: nothing is found by scanning."""
    return [EchoHandler(node_id, now_ms), MetricsHandler(node_id, now_ms, log=log)]


def last_issued_file(state_dir: Path) -> Path:
    """Return the file that remembers the newest manifest's time."""
    return state_dir / "last_issued_ms"


async def run_agent(config: NodeConfig, state_dir: Path, loopback_port: int, stream: TextIO) -> None:
    """Run the daemon of the node in ``state_dir`` until cancelled.

    Raises:
        IdentityFilesError: the identity cannot be used, or another daemon uses it.
        OSError: the loopback port is taken.
        HardwareIdError: no hardware id can be read.
        FailedError: it has failed.
    """
    identity = IdentityFiles(state_dir).read()
    with held_alone(state_dir), opened(stream) as (log, _lines):
        await _run(config, identity, state_dir, loopback_port, log)


async def _run(
    config: NodeConfig, identity: NodeIdentity, state_dir: Path, loopback_port: int, log: FilteringBoundLogger
) -> None:
    around = node_environment(config, f"edge-kubelet-{identity.node_id}", log, IdentityFiles(state_dir))
    node = Node(
        identity,
        make_handlers(identity.node_id, around.log),
        fingerprint(read_hardware_ids(Path("/"))),
        around,
        last_issued_file(state_dir),
        IdentityFiles(state_dir),
    )
    loopback = LoopbackServer(
        lambda: (sent.wire, sent.etag) if (sent := node.announcer.published) else None,
        lambda: _readiness(node, identity, around),
        loopback_port,
    )
    asyncio.get_running_loop().set_default_executor(prestarted_pool())
    loopback.start()
    around.publisher.start()
    around.log.info("kubelet started", node_id=identity.node_id, loopback=f"http://127.0.0.1:{loopback.port}")
    try:
        with fatal_errors_logged(log):
            await node.run()
    finally:
        await around.publisher.stop()
        await asyncio.to_thread(loopback.close)


def _readiness(node: Node, identity: NodeIdentity, around: NodeEnvironment) -> Readiness:
    # Ready means that calls flow: the relay has taken the manifest. A broker that is away is shown, but
    # either way of announcing suffices.
    return Readiness(
        ready=node.link.state is LinkState.ANNOUNCED,
        subsystems={
            "identity": "issued" if identity.root_pem else "self-signed: install a certificate",
            "manifest": "signed" if node.announcer.current else "not signed yet",
            "broker": "connected" if around.publisher.connected else "connecting",
            "relay": node.link.state.value,
        },
    )
