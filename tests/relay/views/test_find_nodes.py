from collections.abc import Mapping
from typing import Any

import pytest

from relay.calls.gateway import CallGateway
from relay.views.find_nodes import FindNodes
from tests.fakes.callers import call_of
from tests.fakes.hub import Hub
from tests.fakes.routers import ScriptedRouter
from tests.fakes.signer import ECHO, METRICS, NODE_ID, OTHER_NODE_ID


@pytest.fixture
def gateway(hub: Hub) -> CallGateway:
    hub.relay_tools.register(FindNodes(hub.fleet).tool(hub.registry))
    return hub.gateway(ScriptedRouter())


async def found(hub: Hub, gateway: CallGateway, tenant: str = "acme", **arguments: Any) -> Mapping[str, Any]:
    answer = await gateway.call(call_of(hub.token(tenant=tenant), "find_nodes", arguments))
    assert answer.result is not None, answer.error
    return answer.result


async def test_nodes_are_found_by_id_kind_and_connection(hub: Hub, gateway: CallGateway) -> None:
    hub.connect(hub.ca.issue(), capabilities=[ECHO])
    hub.announce(hub.ca.issue(OTHER_NODE_ID), capabilities=[METRICS])
    assert [node["node_id"] for node in (await found(hub, gateway))["nodes"]] == sorted(
        [NODE_ID, OTHER_NODE_ID]
    )
    for arguments in ({"query": NODE_ID.upper()}, {"kind": "system.echo"}, {"online": True}):
        result = await found(hub, gateway, **arguments)
        assert result["nodes"] == [{"node_id": NODE_ID, "online": True, "kinds": ["system.echo"]}]
    assert (await found(hub, gateway, kind="system.nothing"))["nodes"] == []
