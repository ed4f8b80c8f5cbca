"""The daemon's composition root: the one place where its parts meet the clock, the disk and the network.

The loopback server starts first and ends last, so that a node that is never accepted stays visible. Must not
hold behaviour of its own.
"""

import asyncio
import os
import random
from collections.abc import Awaitable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TextIO

from structlog.typing import FilteringBoundLogger

from kubelet.announce.hardware import read_hardware_ids
from kubelet.announce.mqtt import FIRST_WAIT_S, LONGEST_WAIT_S, MqttPublisher, NoPublisher, Publisher
from kubelet.backoff import NodeBackoff
from kubelet.caller_tools.assembly import CallerTools
from kubelet.caller_tools.sessions import CallerNames
from kubelet.config import DaemonPlan, NodeConfig, kinds_directory
from kubelet.daemon.node import Node, NodeEnvironment, NodeSettings
from kubelet.daemon.status import DaemonStatus, LogCounts, loops_of, metrics_text, readiness_of
from kubelet.handlers.base import Handler, HandlerFactory
from kubelet.loopback.server import LoopbackServer
from kubelet.process import held_alone, now_ms
from kubelet.session.relay_frames import LinkEvent
from kubelet.session.tls import NodeTls
from schemas.addresses import BrokerAddress
from schemas.frames import FrameReader
from schemas.health import endless, stalled
from schemas.identity_files import IdentityFiles, NodeIdentity
from schemas.log_level import LogThreshold
from schemas.manifest import fingerprint
from schemas.process.logs import fatal_errors_logged, opened
from schemas.process.resources import Uptime
from schemas.process.service_manager import ServiceManager
from schemas.process.settings_reload import SettingsReload
from schemas.process.spans import SpanSink, exported
from schemas.process.status_socket import served
from schemas.registry import Contract, read_contract
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
) -> NodeEnvironment:
    """Return what the ``nodes`` nodes of this process share, with the system's clock and randomness.

    ``files``: whose root is trusted, if so configured, and whose leaf is presented to the broker.
    ``contract``: the documents and kinds, by default those of RFC-0001.
    """
    tls = NodeTls(files, own_root=config.own_root)
    rng = random.Random(os.urandom(16))  # noqa: S311 - jitter, not a secret
    contract = contract or read_contract(())
    return NodeEnvironment(
        config=config,
        publisher=_publisher(config.broker, client_id, log, rng, tls, nodes),
        registry=contract.registry,
        reader=FrameReader(contract.registry),
        kinds=contract.kinds,
        now_ms=now_ms,
        random_bytes=os.urandom,
        rng=rng,
        log=log,
        relay_tls=lambda: tls.to_relay(config.relay_url),
    )


def _publisher(  # noqa: PLR0913, PLR0917 - what comes in from outside
    broker: BrokerAddress | None,
    client_id: str,
    log: FilteringBoundLogger,
    rng: random.Random,
    tls: NodeTls,
    nodes: int,
) -> Publisher:
    if broker is None:
        return NoPublisher()
    backoff = NodeBackoff(rng, FIRST_WAIT_S, LONGEST_WAIT_S)
    return MqttPublisher(broker, client_id, log, backoff, tls.to_broker(broker), nodes=nodes)


def make_handlers(node_id: str, log: FilteringBoundLogger, contract: Contract | None = None) -> list[Handler]:
    """Return the handlers of this node: one of each kind, built in or of a package.

    Raises:
        ConfigError: the handler of a package cannot be used.
    """
    contract = contract or read_contract(())
    handlers = [
        _factory(kind.name)(kind.capability, node_id, now_ms, log)
        for kind in sorted(contract.kinds, key=lambda kind: kind.name)
        if kind.capability is not None
    ]
    if any(each.load_handler is not None for each in contract.named):
        from kubelet.handlers.named import named_handlers  # noqa: PLC0415 - memory that few nodes need

        handlers += named_handlers(contract, handlers, node_id, now_ms, log)
    return handlers


def _factory(kind: str) -> HandlerFactory:
    """Return what makes the handler of a kind that ships: its module has the kind's name."""
    factory: HandlerFactory = import_module(f"kubelet.handlers.{kind.replace('.', '_')}").HANDLER
    return factory


def last_issued_file(state_dir: Path) -> Path:
    """Return the file that remembers the newest manifest's time."""
    return state_dir / "last_issued_ms"


def caller_ids_file(state_dir: Path) -> Path:
    """Return the file that remembers to whom the callers' ids belong."""
    return state_dir / "caller_ids.json"


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
    logged = opened("kubelet", stream, threshold=threshold, on_fault=counts.fault, on_lost=counts.lost)
    spans = exported(plan.config.otlp, "edge-kubelet")
    with held_alone(plan.state_dir), logged as (log, _lines), spans as sink:
        await _run(plan, identity, threshold, log, counts, sink)


async def _run(  # noqa: PLR0913, PLR0917 - what is opened around it
    plan: DaemonPlan,
    identity: NodeIdentity,
    threshold: LogThreshold,
    log: FilteringBoundLogger,
    counts: LogCounts,
    spans: SpanSink,
) -> None:
    state_dir = plan.state_dir
    contract = read_contract(plan.config.kinds, kinds_directory(plan.state_dir))
    client_id = f"edge-kubelet-{identity.node_id}"
    environment = replace(
        node_environment(plan.config, client_id, log, IdentityFiles(state_dir), contract), spans=spans
    )
    node = Node(
        identity,
        make_handlers(identity.node_id, environment.log, contract),
        fingerprint(read_hardware_ids(Path("/"))),
        environment,
        last_issued_file(state_dir),
        IdentityFiles(state_dir),
    )
    tools = _caller_tools(node, state_dir, log)
    loop, loopback_ended = asyncio.get_running_loop(), asyncio.Event()
    settings = NodeSettings(plan, node, threshold)
    status = DaemonStatus(
        plan, node, environment.publisher, tools, counts, now_ms, Uptime(), loop, settings.serialized
    )
    loopback = LoopbackServer(
        lambda: (sent.wire, sent.etag) if (sent := node.announcer.published) else None,
        lambda: readiness_of(node, environment.publisher, tools),
        plan.loopback_port,
        on_end=lambda: loop.call_soon_threadsafe(loopback_ended.set),
        metrics=lambda: metrics_text(status()),
    )
    loop.set_default_executor(prestarted_pool(HELPERS))
    manager, loops = ServiceManager.of(os.environ, os.getpid(), log), loops_of(node, environment.publisher)
    async with AsyncExitStack() as stack:
        loopback.start()
        stack.push_async_callback(asyncio.to_thread, loopback.close)
        await stack.enter_async_context(served(state_dir, status))
        if plan.socket is not None:
            await stack.enter_async_context(tools.serving(plan.socket, plan.socket_group))
        environment.publisher.start()
        stack.push_async_callback(environment.publisher.stop)
        url = f"http://127.0.0.1:{loopback.port}"
        environment.log.info("kubelet started", node_id=identity.node_id, loopback=url)
        if plan.config.broker is None:
            log.info("no broker: the session alone")
        try:
            with fatal_errors_logged(log):
                manager.ready()
                work = {
                    "node": node.run(),
                    "broker": environment.publisher.ended.wait(),
                    "loopback": loopback_ended.wait(),
                    "settings": SettingsReload(settings.read, manager, log).run(),
                    "service manager": manager.run(
                        lambda: stalled(loops), lambda: _status(node, environment)
                    ),
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
                await node.drain()


def _status(node: Node, environment: NodeEnvironment) -> str:
    """Return what the service manager shows, in one line."""
    broker = environment.publisher.health.state
    return f"relay: {node.link.state.value}; broker: {broker}; commands: {node.dispatcher.inflight}"


def _caller_tools(node: Node, state_dir: Path, log: FilteringBoundLogger) -> CallerTools:
    """Return the tools that callers lend to this node's local agents, by the frames of ``node``."""
    names = CallerNames(caller_ids_file(state_dir), log)
    tools = CallerTools(node.identity.node_id, node.frames.send, names, os.urandom, log)
    for type_, handler in tools.handlers.items():
        node.frames.on_frame(type_, handler)

    def follow(event: LinkEvent) -> None:
        if event is LinkEvent.LOST:
            tools.lost()
        else:
            tools.connected(resumed=event is LinkEvent.RESUMED)

    node.frames.on_link(follow)
    return tools
