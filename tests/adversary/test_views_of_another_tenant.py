"""A caller names nodes that it does not reach in every way that a view has, to learn that they exist.

They are another tenant's, or of its own tenant and none of those that its token is for. Each time the answer
must be the one for a name that exists nowhere, but for the name itself; nothing of the others may be in it,
and nothing may reach them. A selection in the URL must not widen what its caller may do.
"""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from relay.auth.permissions import SESSION_SCOPE
from relay.fleet.node_names import UnknownNodeError
from relay.fleet.selection import Selection
from relay.fleet.tools import BEFORE_ALL
from relay.mcp_api.resources import ResourceCatalog
from relay.mcp_api.sdk import instructions
from relay.mcp_api.tool_list import ToolList
from relay.streams.telemetry.resource import TelemetryResource
from schemas.addresses import View
from tests.fakes.hub import READ_ONLY, Hub
from tests.fakes.signer import ECHO, METRICS, TENANT
from tests.fakes.view_stage import OTHER_TENANT, ViewStage

SECRET = {"vault", "secret", "bank", OTHER_TENANT}


class Views:
    """A relay with one node that the caller reaches, and two that it does not: they are of ``tenant``."""

    def __init__(self, hub: Hub, tenant: str) -> None:
        self.stage = ViewStage(hub)
        self.tenant = tenant
        if tenant == TENANT:
            self.stage.nodes = ("*", "!tag:secret")
        self.own = self.stage.node("barn", "gateway", capabilities=[ECHO])
        self.foreign = self.stage.node("vault", "secret", "site=bank", tenant=tenant)
        self.stage.node("vault door", "secret", tenant=tenant, capabilities=[METRICS])
        self.absent = self.foreign[:-1] + ("1" if self.foreign[-1] == "0" else "0")


@pytest.fixture(params=[OTHER_TENANT, TENANT], ids=["another tenant", "not of the token"])
def views(hub: Hub, request: pytest.FixtureRequest) -> Views:
    return Views(hub, request.param)


def without(error: Mapping[str, Any], name: str) -> str:
    return json.dumps(error).replace(name, "NAME")


@pytest.mark.parametrize(
    ("foreign", "absent"),
    [
        pytest.param("id", "absent id", id="id"),
        pytest.param("prefix", "absent prefix", id="prefix"),
        pytest.param("vault", "fault", id="label"),
        pytest.param("tag:secret", "tag:zecret", id="tag"),
        pytest.param("site=bank", "site=zank", id="tag with a value"),
    ],
)
@pytest.mark.parametrize("member", ["node", "nodes"])
async def test_a_foreign_name_is_answered_as_one_that_is_nowhere(
    views: Views, member: str, foreign: str, absent: str
) -> None:
    shown = {
        "id": views.foreign,
        "absent id": views.absent,
        "prefix": views.foreign[:25],
        "absent prefix": "7" + views.foreign[1:25],
    }
    answers = []
    for name in (shown.get(foreign, foreign), shown.get(absent, absent)):
        arguments: dict[str, Any] = {member: [name] if member == "nodes" else name}
        error = await views.stage.error(**arguments)
        answers.append(without(error, name))
        rest = answers[-1].lower()
        assert not any(word in rest for word in SECRET)
    assert answers[0] == answers[1]
    assert views.stage.router.commands == []


async def test_a_search_finds_and_counts_only_ones_own(views: Views) -> None:
    for arguments in (
        {},
        {"query": "vault"},
        {"query": views.foreign},
        {"tags": ["secret"]},
        {"kind": "sys"},
    ):
        found = await views.stage.result("find_nodes", **arguments)
        assert [node["node_id"] for node in found["nodes"]] == ([] if arguments else [views.own])
        assert found["total"] == len(found["nodes"])


async def test_all_nodes_are_all_of_ones_own(views: Views) -> None:
    result = await views.stage.result(nodes=["*", "tag:gateway"])
    assert [entry["node_id"] for entry in result["results"]] == [views.own]
    assert {command.node_id for command in views.stage.router.commands} == {views.own}


def test_what_only_others_offer_is_not_listed(views: Views) -> None:
    assert listed(views, "view=kinds") == ["find_nodes", "sysecho.invoke"]


@pytest.mark.parametrize("query", ["nodes={foreign}", "nodes=vault", "tags=secret", "tags=site%3Dbank"])
@pytest.mark.parametrize("view", ["tools", "kinds"])
def test_a_url_cannot_select_another_tenants_nodes(views: Views, query: str, view: str) -> None:
    with pytest.raises(UnknownNodeError) as caught:
        listed(views, f"view={view}&{query.format(foreign=views.foreign)}")
    absent = query.format(foreign=views.absent).replace("vault", "fault").replace("secret", "zecret")
    with pytest.raises(UnknownNodeError) as nowhere:
        listed(views, f"view={view}&{absent.replace('bank', 'zank')}")
    names = (("vault", "fault"), ("secret", "zecret"), ("bank", "zank"), (views.foreign, views.absent))
    expected = str(caught.value)
    for name, other in names:
        expected = expected.replace(name, other)
    assert expected == str(nowhere.value)


async def test_a_selection_of_ones_own_nodes_is_no_permission(views: Views) -> None:
    guarded = {**ECHO, "cap_id": "guarded"}
    node_id = views.stage.node("gate", capabilities=[guarded])
    selected = Selection(nodes=("gate",))
    name = f"sysecho.{node_id}.guarded.invoke"
    error = await views.stage.error(name, scopes=("sessions:message",), selection=selected, message="ping")
    assert error["code"] == "E_SAFETY_DENIED"
    error = await views.stage.error(f"sysecho.{views.own}.echo.invoke", selection=selected, message="ping")
    assert error["code"] == "E_SAFETY_DENIED"
    assert views.stage.router.commands == []


async def test_a_call_outside_the_selection_is_answered_as_one_of_no_node(views: Views) -> None:
    selected = Selection(tags=("nowhere",))
    for name in (f"sysecho.{node_id}.echo.invoke" for node_id in (views.own, views.foreign, views.absent)):
        error = await views.stage.error(name, selection=selected, message="ping")
        assert error == await views.stage.error(f"sysecho.{views.absent}.echo.invoke", message="ping")


async def test_resources_and_instructions_show_only_what_is_reached(views: Views) -> None:
    hub = views.stage.hub
    principal = hub.authenticator.identify(hub.token((READ_ONLY,), nodes=views.stage.nodes))
    catalog = ResourceCatalog(hub.fleet, hub.registry, TelemetryResource(hub.telemetry, hub.fleet))
    uris = [resource["uri"] for resource in catalog.listed(principal)[0]]
    assert {uri.split("/")[2] for uri in uris if uri.startswith("node:")} == {views.own}
    for uri in ("fleet://nodes", "fleet://changes"):
        document = await catalog.read(principal, uri)
        assert document is not None
        assert views.own in document.text
        assert not any(word in document.text for word in {*SECRET, views.foreign})
    for reference in (views.foreign, "vault", views.foreign[:25]):
        for part in ("manifest", "identity", "telemetry"):
            with pytest.raises(UnknownNodeError) as caught:
                await catalog.read(principal, f"node://{reference}/{part}")
            assert caught.value.close == ()
    for view in View:
        assert "vault" not in instructions(hub.fleet, principal.rights, view)


async def test_no_session_is_opened_with_a_node_that_is_not_reached(views: Views) -> None:
    answers = set()
    for node_id in (views.foreign, views.absent):
        error = await views.stage.error(
            "session_message", scopes=(SESSION_SCOPE,), node_id=node_id, context={"caller_id": "agent"}
        )
        answers.add(without(error, node_id))
    assert len(answers) == 1


def listed(views: Views, query: str) -> list[str]:
    hub = views.stage.hub
    rights = hub.authenticator.identify(hub.token((READ_ONLY,), nodes=views.stage.nodes)).rights
    tools = ToolList(hub.fleet, hub.relay_tools, hub.options)
    selection = hub.options.read(query).selection
    return [tool.listed()["name"] for tool in tools.listed(rights, selection, BEFORE_ALL, 99)]
