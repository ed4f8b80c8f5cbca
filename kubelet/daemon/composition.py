"""The daemon's composition root: the one place where its parts meet the clock, the disk and the network.

A ``Node`` has what is between the relay and the handlers: dispatcher, sampler, announcer and session. Around
it are the broker's connection, the socket of local agents, and what an operator reads. The loopback pages
start first and end last, so that a node that is never accepted stays visible. Must not hold behaviour of its
own.
"""

import asyncio
import os
import random
from collections.abc import Awaitable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TextIO

from structlog.typing import FilteringBoundLogger

from kubelet.announce.hardware import read_hardware_ids
from kubelet.announce.mqtt import FIRST_WAIT_S, LONGEST_WAIT_S, MqttPublisher, NoPublisher
from kubelet.caller_tools.assembly import CallerTools
from kubelet.caller_tools.sessions import CallerNames
from kubelet.ceiling import Ceiling
from kubelet.config import (
    SERVICE_SETTINGS,
    DaemonPlan,
    NodeConfig,
    caller_ids_file,
    kinds_directory,
    last_issued_file,
)
from kubelet.daemon.node import Node, NodeEnvironment, NodeSettings
from kubelet.daemon.status import DaemonStatus, LogCounts, metrics_text
from kubelet.handlers.base import OwnFiles
from kubelet.handlers.factory import NodeHandlers, make_handlers
from kubelet.loopback import LoopbackServer
from kubelet.process import hold_alone, now_ms
from kubelet.session.relay_frames import LinkEvent, RelayFrames
from kubelet.session.tls import NodeTls
from schemas.frames import FrameReader
from schemas.health import endless, stalled
from schemas.identity_files import IdentityFiles, NodeIdentity
from schemas.lines import LogThreshold
from schemas.manifest import fingerprint
from schemas.pacing import Backoff
from schemas.process.logs import fatal_errors_logged, open_log
from schemas.process.resources import Uptime, keep_trimmed
from schemas.process.service_manager import ServiceManager, SettingsReload
from schemas.process.spans import exported
from schemas.process.status_socket import served
from schemas.registry import Contract, read_contract
from schemas.spans import SpanSink, no_spans
from schemas.threads import prestarted_pool

HELPERS = 4
"""Threads for name resolution, for files, and for joining threads at the end."""


def node_environment(  # noqa: PLR0913 - what the nodes of a process share
    config: NodeConfig,
    client_id: str,
    log: FilteringBoundLogger,
    files: IdentityFiles,
    contract: Contract | None = None,
    *,
    nodes: int = 1,
    spans: SpanSink = no_spans,
) -> NodeEnvironment:
    """Return what the ``nodes`` nodes of this process share, with the system's clock and randomness.

    ``files``: whose root is trusted, if so configured, and whose leaf is presented to the broker.
    ``contract``: the documents and kinds, by default those of RFC-0001.
    """
    tls = NodeTls(files, own_root=config.own_root)
    rng = random.Random(os.urandom(16))  # noqa: S311 - jitter, not a secret
    if config.broker is None:
        publisher: MqttPublisher | NoPublisher = NoPublisher()
    else:
        backoff = Backoff(FIRST_WAIT_S, LONGEST_WAIT_S, partial(rng.uniform, 0.0))
        context = tls.to_broker(config.broker)
        publisher = MqttPublisher(config.broker, client_id, log, backoff, context, nodes=nodes)
    contract = contract or read_contract(())
    return NodeEnvironment(
        config=config,
        publisher=publisher,
        registry=contract.registry,
        reader=FrameReader(contract.registry),
        kinds=contract.kinds,
        now_ms=now_ms,
        random_bytes=os.urandom,
        rng=rng,
        log=log,
        relay_tls=lambda: tls.to_relay(config.relay_url),
        spans=spans,
    )


async def run_daemon(plan: DaemonPlan, stream: TextIO) -> None:
    """Run the daemon by ``plan`` until cancelled.

    Raises:
        IdentityFilesError: the identity cannot be used, or another daemon uses it.
        SocketFileError: the socket cannot be made.
        CallerNamesError: the file of the callers' ids is damaged.
        OSError: the loopback port is taken.
        HardwareIdError: no hardware id can be read.
        ConfigError: a kind that the operator named cannot be used.
        FailedError: it has failed.
    """
    identity = IdentityFiles(plan.state_dir).read()
    threshold, counts = LogThreshold(plan.config.log_level), LogCounts()
    logged = open_log("kubelet", stream, threshold=threshold, on_fault=counts.fault, on_lost=counts.lost)
    spans = exported(plan.config.otlp, "edge-kubelet")
    with hold_alone(plan.state_dir), logged as (log, _lines), spans as sink:
        ceiling = Ceiling.of_texts(plan.settings)
        node, handlers = _node(plan, identity, log, sink, ceiling)
        tools = _caller_tools(node.frames, identity.node_id, plan.state_dir, log)
        settings = NodeSettings(plan, node, threshold, ceiling)
        loop = asyncio.get_running_loop()
        status = DaemonStatus(settings, node, tools, counts, now_ms, Uptime(), loop, handlers.state)
        await _serve(plan, status, log)


def _node(
    plan: DaemonPlan, identity: NodeIdentity, log: FilteringBoundLogger, spans: SpanSink, ceiling: Ceiling
) -> tuple[Node, NodeHandlers]:
    files = IdentityFiles(plan.state_dir)
    contract = read_contract(plan.config.kinds, kinds_directory(plan.state_dir))
    client_id = f"edge-kubelet-{identity.node_id}"
    environment = node_environment(plan.config, client_id, log, files, contract, spans=spans)
    named = (plan.state_dir, SERVICE_SETTINGS, plan.config_file, plan.socket)
    own = OwnFiles(plan.state_dir, tuple(each for each in named if each is not None))
    handlers = make_handlers(identity.node_id, log, contract, now_ms, own=own, ceiling=ceiling)
    hardware = fingerprint(read_hardware_ids(Path("/")))
    node = Node(identity, handlers, hardware, environment, last_issued_file(plan.state_dir), files)
    return node, handlers


def _caller_tools(
    frames: RelayFrames, node_id: str, state_dir: Path, log: FilteringBoundLogger
) -> CallerTools:
    """Return the tools that callers lend to this node's local agents, by the ``frames`` of its session."""
    names = CallerNames(caller_ids_file(state_dir), log)
    tools = CallerTools(node_id, frames.send, names, os.urandom, log)
    for type_, handler in tools.handlers.items():
        frames.on_frame(type_, handler)

    def follow(event: LinkEvent) -> None:
        if event is LinkEvent.LOST:
            tools.lost()
        else:
            tools.connected(resumed=event is LinkEvent.RESUMED)

    frames.on_link(follow)
    return tools


async def _serve(plan: DaemonPlan, status: DaemonStatus, log: FilteringBoundLogger) -> None:
    """Start what was put together, and run it until cancelled."""
    node, publisher, loop, loopback_ended = status.node, status.node.publisher, status.loop, asyncio.Event()
    loopback = LoopbackServer(
        lambda: (sent.wire, sent.etag) if (sent := node.announcer.published) else None,
        status.readiness,
        plan.loopback_port,
        on_end=lambda: loop.call_soon_threadsafe(loopback_ended.set),
        metrics=lambda: metrics_text(status()),
    )
    loop.set_default_executor(prestarted_pool(HELPERS))
    manager, loops = ServiceManager.of(os.environ, os.getpid(), log), status.loops()
    async with AsyncExitStack() as stack:
        loopback.start()
        stack.push_async_callback(asyncio.to_thread, loopback.close)
        await stack.enter_async_context(served(plan.state_dir, status))
        if plan.socket is not None:
            await stack.enter_async_context(status.tools.serving(plan.socket, plan.socket_group))
        publisher.start()
        stack.push_async_callback(publisher.stop)
        url = f"http://127.0.0.1:{loopback.port}"
        log.info("kubelet started", node_id=node.identity.node_id, loopback=url)
        if plan.config.broker is None:
            log.info("no broker: the session alone")
        try:
            with fatal_errors_logged(log):
                manager.ready()
                work = {
                    "node": node.run(),
                    "broker": publisher.ended.wait(),
                    "loopback": loopback_ended.wait(),
                    "settings": SettingsReload(status.settings.read, manager, log).run(),
                    "service manager": manager.run(lambda: stalled(loops), status.line),
                    "heap": keep_trimmed(),
                }
                await _until_stopped(work, node, manager)
        finally:
            log.info("kubelet ended")


async def _until_stopped(work: Mapping[str, Awaitable[object]], node: Node, manager: ServiceManager) -> None:
    """Do ``work``, of which nothing may end, until cancelled; then answer the commands that run."""
    async with asyncio.TaskGroup() as tasks:
        loops = [tasks.create_task(endless(name, loop)) for name, loop in work.items()]
        try:
            await asyncio.Event().wait()
        finally:
            if not any(loop.done() for loop in loops):
                manager.stopping()
                await node.dispatcher.drain()
