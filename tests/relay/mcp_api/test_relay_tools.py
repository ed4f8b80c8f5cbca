import json

import pytest

from relay.auth.permissions import Rights
from relay.calls.relay_tools import RelayTools
from relay.fleet.tools import BEFORE_ALL
from relay.mcp_api.tool_list import RelayToolEntries
from relay.settings.config import View
from schemas.registry import SchemaRegistry
from tests.fakes.relay_tools import parrot
from tests.fakes.signer import TENANT

READERS = Rights(TENANT, frozenset({"read_only"}))


@pytest.mark.parametrize(("dashed", "name"), [(False, "relay.parrot"), (True, "relay-parrot")])
def test_an_entry_is_that_of_a_tool_under_either_form_of_its_name(
    registry: SchemaRegistry,
    dashed: bool,  # noqa: FBT001 - of the table
    name: str,
) -> None:
    tools, tool = RelayTools(), parrot(registry)
    tools.register(tool)
    (entry,) = RelayToolEntries(tools).listed(READERS, View.TOOLS, {}, BEFORE_ALL)
    document = entry.listed(dashed=dashed)
    assert json.loads(entry.listed_text(dashed=dashed)) == document
    assert document["name"] == name
    assert document["inputSchema"] == tool.schemas.input_schema
    assert "$id" not in document["inputSchema"]
    assert document["annotations"]["readOnlyHint"] is True
    assert document["_meta"]["edge-kubelet/canonical-name"] == "relay.parrot"


def test_only_entries_behind_the_place_are_listed(registry: SchemaRegistry) -> None:
    tools = RelayTools()
    for name in ("a", "b", "c"):
        tools.register(parrot(registry, canonical=name))
    entries = RelayToolEntries(tools)
    assert [entry.place for entry in entries.listed(READERS, View.TOOLS, {}, (0, "a"))] == [
        (0, "b"),
        (0, "c"),
    ]
    assert entries.listed(READERS, View.TOOLS, {}, (1, "")) == []
