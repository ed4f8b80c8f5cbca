"""A gateway to one node that answers as the test scripts it."""

import pytest

from relay.calls.gateway import CallGateway
from tests.fakes.hub import Hub
from tests.fakes.routers import ScriptedRouter
from tests.fakes.signer import NODE_ID, SimulatedNode


@pytest.fixture
def node(hub: Hub) -> SimulatedNode:
    node = hub.ca.issue()
    hub.connect(node)
    return node


@pytest.fixture
def router() -> ScriptedRouter:
    return ScriptedRouter()


@pytest.fixture
def gateway(hub: Hub, node: SimulatedNode, router: ScriptedRouter) -> CallGateway:
    assert node.node_id == NODE_ID
    return hub.gateway(router)
