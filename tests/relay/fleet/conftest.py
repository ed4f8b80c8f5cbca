"""A node with a leaf of the hub's CA."""

import pytest

from tests.fakes.hub import Hub
from tests.fakes.signer import SimulatedNode


@pytest.fixture
def node(hub: Hub) -> SimulatedNode:
    return hub.ca.issue()
