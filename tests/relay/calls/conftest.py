"""Gateways to one node that answers as the test scripts it, with idempotency keys and without."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from relay.calls.gateway import CallGateway
from schemas.registry import SchemaRegistry
from tests.fakes.hub import Hub
from tests.fakes.keyed_calls import Stage, kinds
from tests.fakes.routers import HeldRouter, ScriptedRouter
from tests.fakes.seconds import Seconds
from tests.fakes.signer import NODE_ID, SimulatedNode


@pytest.fixture
def node(hub: Hub) -> SimulatedNode:
    node = hub.ca.issue()
    hub.connect(node)
    return node


@pytest.fixture
def gateway(hub: Hub, node: SimulatedNode, router: ScriptedRouter) -> CallGateway:
    assert node.node_id == NODE_ID
    return hub.gateway(router)


@pytest.fixture
def seconds() -> Seconds:
    return Seconds()


@pytest.fixture
def single(tmp_path: Path, registry: SchemaRegistry) -> Iterator[Hub]:
    """The hub of a relay whose tools may not be called twice."""
    hub = Hub(tmp_path, registry, kinds=kinds(idempotent=False))
    yield hub
    hub.close()


@pytest.fixture
def stage(single: Hub, router: ScriptedRouter, seconds: Seconds) -> Stage:
    return Stage(single, router, seconds)


@pytest.fixture
def held() -> HeldRouter:
    return HeldRouter()


@pytest.fixture
def waiting(single: Hub, held: HeldRouter, seconds: Seconds) -> Stage:
    """The gateway of a node that answers when a test does."""
    return Stage(single, held, seconds)
