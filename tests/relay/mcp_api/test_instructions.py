"""What agents read when they connect: the labels of their own tenant, as many as fit."""

import pytest

from relay.auth.permissions import Rights
from relay.mcp_api.instructions import MAX_BYTES, Instructions
from relay.state.names import NodeName
from tests.fakes.hub import Hub
from tests.fakes.signer import NODE_ID, OTHER_NODE_ID, TENANT

READERS = Rights(TENANT, frozenset({"read_only"}))


@pytest.fixture
def instructions(hub: Hub) -> Instructions:
    return Instructions(hub.fleet)


def test_without_labels_there_is_the_static_text_alone(hub: Hub, instructions: Instructions) -> None:
    static = instructions.text(READERS)
    assert static.startswith("Each tool is one capability of one Linux node")
    assert static.endswith(".")
    hub.fleet.rename({NODE_ID: NodeName(TENANT, "", ("gateway",))})
    assert instructions.text(READERS) == static


def test_the_labels_of_the_tenant_are_named_in_order(hub: Hub, instructions: Instructions) -> None:
    hub.fleet.rename({NODE_ID: NodeName(TENANT, "greenhouse pi"), OTHER_NODE_ID: NodeName(TENANT, "Barn")})
    assert instructions.text(READERS).endswith(' The operator calls the nodes: "Barn", "greenhouse pi".')


def test_another_tenant_and_callers_who_may_not_read_see_no_label(
    hub: Hub, instructions: Instructions
) -> None:
    static = instructions.text(READERS)
    hub.fleet.rename({NODE_ID: NodeName(TENANT, "greenhouse pi")})
    assert instructions.text(Rights("globex", READERS.safety_classes)) == static
    assert instructions.text(Rights(TENANT, frozenset({"reversible"}))) == static


def test_a_retired_node_is_not_named(hub: Hub, instructions: Instructions) -> None:
    hub.fleet.rename({NODE_ID: NodeName(TENANT, "greenhouse pi"), OTHER_NODE_ID: NodeName(TENANT, "barn")})
    hub.fleet.retire(frozenset({NODE_ID}), ())
    assert instructions.text(READERS).endswith('"barn".')


def node_id(number: int) -> str:
    return f"01hzx9k3m4p7q8r9s0t1v2{number:04}"


@pytest.mark.parametrize("length", [1, 17, 48])
def test_as_many_labels_as_fit_are_named_and_that_there_are_more(
    hub: Hub, instructions: Instructions, length: int
) -> None:
    labels = [f"{number:04}".rjust(length, "n")[-length:] for number in range(10 if length == 1 else 400)]
    hub.fleet.rename({node_id(number): NodeName(TENANT, label) for number, label in enumerate(labels)})
    text = instructions.text(READERS)
    assert text.isascii()
    assert len(text) <= MAX_BYTES
    if length > 1:
        assert text.endswith(", and more, which fleet://nodes lists.")
        assert len(text) > MAX_BYTES - length - 10


def test_labels_beyond_ascii_are_named_in_their_letters_within_the_bytes(
    hub: Hub, instructions: Instructions
) -> None:
    hub.fleet.rename({NODE_ID: NodeName(TENANT, "Gewächshaus")})
    assert instructions.text(READERS).endswith('"Gewächshaus".')
    labels = {node_id(number): NodeName(TENANT, f"温室の北側ポンプ {number:03}") for number in range(100)}
    hub.fleet.rename(labels)
    text = instructions.text(READERS)
    assert MAX_BYTES - 60 < len(text.encode()) <= MAX_BYTES
    assert text.endswith("which fleet://nodes lists.")
