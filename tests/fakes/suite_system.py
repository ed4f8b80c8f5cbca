"""A broker, a relay and nodes that know the official conformance suite's tools besides their own.

The relay and the nodes are composed of the parts that ship; only the documents and the kinds are other ones.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kubelet.cli.fleet import read_identities
from kubelet.config import NodeConfig
from kubelet.daemon.composition import node_environment
from kubelet.daemon.node import Node, NodeEnvironment
from kubelet.handlers.base import Handler
from kubelet.handlers.system_metrics import MetricsHandler
from relay.auth.agent_tokens import TokenIssuer
from relay.http.listener import bind
from relay.pki.authority import CertificateAuthority
from relay.server.serving import run_relay
from relay.settings.config import RelayConfig, StateFiles
from relay.settings.environment import now_ms
from relay.state.key_files import load_or_create_key
from schemas.addresses import BrokerAddress, HostPort, mcp_url
from schemas.identity_files import IdentityFiles, NodeIdentity
from schemas.manifest import fingerprint
from schemas.process.logs import make_logger
from schemas.registry import SchemaRegistry
from tests.fakes.background import in_background
from tests.fakes.broker import Broker
from tests.fakes.lines import LogLines
from tests.fakes.shipped_kinds import METRICS, echo_handler
from tests.fakes.suite_kinds import (
    SuiteTool,
    kinds_with_the_suites,
    suite_names,
    suite_tools,
    write_documents,
)

TENANT = "suite"
SPARE_NODES = 8
"""Nodes that are not there at first: one comes whenever the suite wants the list of tools to change."""


@dataclass(frozen=True, slots=True)
class SuiteSystem:
    """What runs: where the relay is, how to get in, and what its one full node was made to do."""

    port: int
    token: str
    names: dict[str, str]
    tools: Sequence[SuiteTool]
    audit_file: Path

    def audit(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.audit_file.read_text("ascii").splitlines()]


@asynccontextmanager
async def suite_system(directory: Path) -> AsyncIterator[SuiteSystem]:
    """Hold a system whose files are in ``directory``, once its tools are listed."""
    write_documents(directory / "documents")
    registry, kinds = SchemaRegistry(directory / "documents"), kinds_with_the_suites()
    state = StateFiles(directory / "relay")
    ca = CertificateAuthority(state.ca, now_ms, os.urandom)
    ca.create()
    ca.issue_mock(1 + SPARE_NODES, directory / "nodes", TENANT)
    identity, *spare = read_identities(directory / "nodes")
    relay_log, node_log = LogLines(), LogLines()
    async with _broker(directory) as broker:
        with bind(HostPort("127.0.0.1", 0)) as listener:
            listener.listen()
            address = HostPort(*listener.getsockname())
            url = f"http://{address}"
            config = RelayConfig(broker, url, address, state)
            async with in_background(run_relay(config, listener, relay_log, registry, kinds)):
                files = IdentityFiles(directory / "nodes" / identity.node_id)
                environment = replace(
                    node_environment(
                        NodeConfig(broker, url), "suite-nodes", make_logger("kubelet", node_log), files
                    ),
                    registry=registry,
                    kinds=kinds,
                )
                tools = suite_tools(identity.node_id, change := _Change(spare, environment))
                async with _nodes(identity, tools, environment), change.running():
                    await relay_log.until("node announced")
                    await node_log.until("relay connected")
                    names = suite_names(identity.node_id)
                    yield SuiteSystem(address.port, _token(config, registry), names, tools, state.audit)


class _Change:
    """Plugs in one more node at every call: what changes the list of tools in the field."""

    def __init__(self, spare: Sequence[NodeIdentity], environment: NodeEnvironment) -> None:
        self._spare = list(spare)
        self._environment = environment
        self._tasks: list[asyncio.Task[None]] = []

    async def __call__(self) -> None:
        identity = self._spare.pop()
        handler = echo_handler(identity.node_id, self._environment.now_ms)
        self._tasks.append(asyncio.create_task(_node(identity, [handler], self._environment).run()))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def _broker(directory: Path) -> AsyncIterator[BrokerAddress]:
    (directory / "broker").mkdir()
    broker = Broker("nats-server", directory / "broker")
    await asyncio.to_thread(broker.start)
    try:
        yield broker.address
    finally:
        await asyncio.to_thread(broker.stop)


@asynccontextmanager
async def _nodes(
    identity: NodeIdentity, tools: Sequence[SuiteTool], environment: NodeEnvironment
) -> AsyncIterator[None]:
    own = [
        echo_handler(identity.node_id, environment.now_ms),
        MetricsHandler(METRICS, identity.node_id, environment.now_ms, environment.log),
    ]
    environment.publisher.start()
    try:
        async with in_background(_node(identity, [*own, *tools], environment).run()):
            yield
    finally:
        await environment.publisher.stop()


def _node(identity: NodeIdentity, handlers: Sequence[Handler], environment: NodeEnvironment) -> Node:
    return Node(
        identity, handlers, fingerprint({"machine_id": identity.node_id}), environment, last_issued=None
    )


def _token(config: RelayConfig, registry: SchemaRegistry) -> str:
    key = load_or_create_key(config.state.token_key, os.urandom)
    issuer = TokenIssuer(key, config.public_url, mcp_url(config.public_url), registry)
    return issuer.issue(
        sub="suite",
        tenant=TENANT,
        scopes=["tools:call:read_only"],
        now_s=now_ms() // 1000,
        ttl_s=3600,
        jti=os.urandom(16).hex(),
    )
