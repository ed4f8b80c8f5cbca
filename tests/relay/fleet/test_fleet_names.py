"""The labels of nodes in the titles of tools, and the names by which tools are found."""

import json
from typing import Any

import pytest

from relay.auth.permissions import Rights
from relay.state.names import NodeName
from schemas.errors import Failure, ToolError
from tests.fakes.fleet_tools import ECHO_NAME, OTHER_TENANT, READ_ONLY, failure
from tests.fakes.hub import Hub
from tests.fakes.signer import (
    DAY_MS,
    ECHO,
    NODE_ID,
    NOW_MS,
    OTHER_NODE_ID,
    TENANT,
    TTL_MS,
    SimulatedNode,
    key_named,
)

# --- names --------------------------------------------------------------------------------------------


def titles(hub: Hub, tenant: str = TENANT) -> set[str]:
    return {tool.listed()["title"] for tool in hub.fleet.selected.listed(Rights(tenant, READ_ONLY))}


def test_a_label_is_in_the_titles_from_the_first_manifest_on_and_after_it_is_changed(
    hub: Hub, node: SimulatedNode
) -> None:
    hub.fleet.rename({NODE_ID: NodeName(TENANT, "greenhouse pi")})
    hub.connect(node)
    assert titles(hub) == {"greenhouse pi: CPU, memory, disks", "greenhouse pi: Echo"}
    before = hub.fleet.selected.version(Rights(TENANT, READ_ONLY))
    hub.fleet.rename({NODE_ID: NodeName(TENANT, "barn")})
    assert titles(hub) == {"barn: CPU, memory, disks", "barn: Echo"}
    assert hub.fleet.selected.version(Rights(TENANT, READ_ONLY)) != before
    assert hub.fleet.resolve(ECHO_NAME, Rights(TENANT, READ_ONLY)).label == "barn"
    hub.fleet.rename({NODE_ID: None})
    assert titles(hub) == {"CPU, memory, disks", "Echo"}


def test_a_label_beyond_ascii_is_in_the_titles_in_its_letters(hub: Hub, node: SimulatedNode) -> None:
    hub.fleet.rename({NODE_ID: NodeName(TENANT, "Gewächshaus")})
    hub.connect(node)
    assert titles(hub) == {"Gewächshaus: CPU, memory, disks", "Gewächshaus: Echo"}
    for tool in hub.fleet.selected.listed(Rights(TENANT, READ_ONLY)):
        assert tool.listed_text().isascii()
        assert json.loads(tool.listed_text()) == tool.listed()


def test_a_tag_changes_no_title_and_no_version(hub: Hub, node: SimulatedNode) -> None:
    hub.connect(node)
    before = hub.fleet.selected.version(Rights(TENANT, READ_ONLY))
    hub.fleet.rename({NODE_ID: NodeName(TENANT, "", ("gateway",))})
    assert hub.fleet.selected.version(Rights(TENANT, READ_ONLY)) == before


def test_a_node_that_moves_to_another_tenant_leaves_its_label_behind(hub: Hub) -> None:
    key = key_named("a node that moved")
    old = hub.ca.issue(NODE_ID, OTHER_TENANT, key=key, now_ms=NOW_MS - DAY_MS)
    hub.fleet.rename({NODE_ID: NodeName(OTHER_TENANT, "secret plan")})
    hub.connect(old)
    assert titles(hub, OTHER_TENANT) == {"secret plan: CPU, memory, disks", "secret plan: Echo"}
    hub.fleet.offer_identity(NODE_ID, hub.ca.issue(NODE_ID, TENANT, key=key).leaf_pem)
    assert titles(hub, OTHER_TENANT) == set()
    assert titles(hub) == {"CPU, memory, disks", "Echo"}
    hub.fleet.rename({NODE_ID: NodeName(TENANT, "barn")})
    assert titles(hub) == {"barn: CPU, memory, disks", "barn: Echo"}


# --- resolving ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [ECHO_NAME, ECHO_NAME.replace(".", "-")], ids=["canonical", "dashed"])
def test_both_forms_of_a_name_are_the_same_tool(hub: Hub, node: SimulatedNode, name: str) -> None:
    hub.connect(node)
    assert hub.fleet.resolve(name, Rights(TENANT, READ_ONLY)).canonical == ECHO_NAME


NODE_NAMES = {
    "a verb": f"sysecho.{NODE_ID}.echo.snapshot",
    "a capability": f"sysecho.{NODE_ID}.other.invoke",
    "a verb without a row": f"sys.{NODE_ID}.sysmetrics.subscribe",
}


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, id=f"{what} that the node has not") for what, name in NODE_NAMES.items()),
        pytest.param("", id="empty"),
        pytest.param("echo", id="no name of a tool"),
        pytest.param(ECHO_NAME.upper(), id="upper case"),
        pytest.param(ECHO_NAME + " ", id="with a tail"),
        pytest.param(ECHO_NAME.replace(".", "-", 1), id="mixed"),
        pytest.param("\x1b[31m" * 1000, id="hostile"),
    ],
)
def test_a_name_that_is_none_is_unknown(hub: Hub, node: SimulatedNode, name: str) -> None:
    hub.connect(node)
    assert failure(hub, name) is Failure.NAME_UNKNOWN


def test_a_kind_that_is_not_registered_is_said_so(hub: Hub, node: SimulatedNode) -> None:
    hub.connect(node)
    assert failure(hub, f"gpio.{NODE_ID}.echo.invoke") is Failure.KIND_UNSUPPORTED


def test_another_tenants_node_cannot_be_told_from_one_that_exists_nowhere(
    hub: Hub, node: SimulatedNode
) -> None:
    hub.connect(node)
    absent = f"sysecho.{OTHER_NODE_ID}.echo.invoke"
    for name in (ECHO_NAME, *NODE_NAMES.values(), f"gpio.{NODE_ID}.echo.invoke", absent):
        with pytest.raises(ToolError) as caught:
            hub.fleet.resolve(name, Rights(OTHER_TENANT, READ_ONLY))
        assert caught.value.failure is Failure.SAFETY_DENIED
        assert caught.value.detail is None


def test_a_manifest_that_has_expired_or_was_rejected_is_invalid(hub: Hub, node: SimulatedNode) -> None:
    hub.fleet.offer_identity(NODE_ID, node.leaf_pem)
    assert failure(hub, ECHO_NAME) is Failure.MANIFEST_NOT_FOUND
    hub.fleet.offer_manifest(NODE_ID, b"{}", "broker")
    assert failure(hub, ECHO_NAME) is Failure.MANIFEST_INVALID
    hub.connect(node)
    hub.fleet.resolve(ECHO_NAME, Rights(TENANT, READ_ONLY))
    hub.clock.advance(TTL_MS)
    assert failure(hub, ECHO_NAME) is Failure.MANIFEST_INVALID


def test_a_node_whose_manifest_is_trusted_can_be_resolved_though_it_is_not_connected(
    hub: Hub, node: SimulatedNode
) -> None:
    hub.announce(node)
    assert hub.fleet.resolve(ECHO_NAME, Rights(TENANT, READ_ONLY)).node_id == NODE_ID


def test_no_text_of_a_stranger_gets_into_the_log(hub: Hub, node: SimulatedNode) -> None:
    hub.announce(node)
    hostile: dict[str, Any] = {**ECHO, "cap_id": "\x1b[31m\u202e"}
    hub.fleet.offer_manifest(NODE_ID, node.manifest(capabilities=[hostile]), "broker")
    hub.fleet.offer_identity(NODE_ID, "\x1b[31m")
    text = hub.lines.getvalue()
    assert "[31m" not in text
    assert len(hub.lines.entries()) == 3
