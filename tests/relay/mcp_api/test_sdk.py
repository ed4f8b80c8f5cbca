"""What the adapters of the SDK do beside a transport; the rest is tested through the endpoint."""

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import pytest

from relay.auth.permissions import Rights
from relay.calls.relay_tools import StreamClosedError
from relay.mcp_api.sdk import MAX_BYTES, OVER_IN_SCOPE, Context, emitter_of, instructions
from schemas.addresses import View
from schemas.labels import NodeName
from tests.fakes.hub import Hub
from tests.fakes.signer import NODE_ID, OTHER_NODE_ID, TENANT


class Session:
    """Notes what is sent on the response stream of a request."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Any, Any]] = []

    async def send_notification(self, notification: Any, related_request_id: Any) -> None:
        self.sent.append((notification.method, notification.params, related_request_id))


async def test_a_notification_is_sent_while_the_clients_request_lasts_and_not_after() -> None:
    over, session = asyncio.Event(), Session()
    request: Any = SimpleNamespace(scope={OVER_IN_SCOPE: over})
    sending: Any = session
    context = Context(
        session=sending,
        lifespan_context=None,
        protocol_version="2025-11-25",
        method="tools/call",
        request_id=7,
        request=request,
    )
    emit = emitter_of(context)
    await emit("notifications/progress", {"progress": 1})
    over.set()
    with pytest.raises(StreamClosedError):
        await emit("notifications/progress", {"progress": 2})
    assert session.sent == [("notifications/progress", {"progress": 1}, 7)]


READERS = Rights(TENANT, frozenset({"read_only"}))


def test_without_labels_there_is_the_static_text_alone(hub: Hub) -> None:
    static = instructions(hub.fleet, READERS, View.KINDS)
    assert static.startswith("Each tool is one capability of one Linux node")
    assert static.endswith(".")
    hub.fleet.rename({NODE_ID: NodeName(TENANT, "", ("gateway",))})
    assert instructions(hub.fleet, READERS, View.KINDS) == static


def test_the_labels_of_the_tenant_are_named_in_order(hub: Hub) -> None:
    hub.fleet.rename({NODE_ID: NodeName(TENANT, "greenhouse pi"), OTHER_NODE_ID: NodeName(TENANT, "Barn")})
    assert instructions(hub.fleet, READERS, View.KINDS).endswith(
        ' The operator calls the nodes: "Barn", "greenhouse pi".'
    )


def test_another_tenant_and_callers_who_may_not_read_see_no_label(hub: Hub) -> None:
    static = instructions(hub.fleet, READERS, View.KINDS)
    hub.fleet.rename({NODE_ID: NodeName(TENANT, "greenhouse pi")})
    assert instructions(hub.fleet, Rights("globex", READERS.safety_classes), View.TOOLS) == static
    assert instructions(hub.fleet, Rights(TENANT, frozenset({"reversible"})), View.TOOLS) == static


def test_a_retired_node_is_not_named(hub: Hub) -> None:
    hub.fleet.rename({NODE_ID: NodeName(TENANT, "greenhouse pi"), OTHER_NODE_ID: NodeName(TENANT, "barn")})
    hub.fleet.retire(frozenset({NODE_ID}), ())
    assert instructions(hub.fleet, READERS, View.KINDS).endswith('"barn".')


def node_id(number: int) -> str:
    return f"01hzx9k3m4p7q8r9s0t1v2{number:04}"


def test_where_tools_have_ids_in_their_names_each_label_has_the_beginning_of_its_own(hub: Hub) -> None:
    hub.fleet.rename({NODE_ID: NodeName(TENANT, "greenhouse pi"), OTHER_NODE_ID: NodeName(TENANT, "Barn")})
    for node in (hub.ca.issue(), hub.ca.issue(OTHER_NODE_ID)):
        hub.connect(node)
    text = instructions(hub.fleet, READERS, View.TOOLS)
    beginnings = dict(re.findall(r'"([^"]+)" \((\w+)\)', text))
    assert [*beginnings] == ["Barn", "greenhouse pi"]
    for label, node_id in (("Barn", OTHER_NODE_ID), ("greenhouse pi", NODE_ID)):
        assert node_id.startswith(beginnings[label])
        assert hub.fleet.names.resolve(TENANT, beginnings[label]) == node_id


@pytest.mark.parametrize("view", View)
@pytest.mark.parametrize("length", [1, 17, 48])
def test_as_many_labels_as_fit_are_named_and_that_there_are_more(hub: Hub, length: int, view: View) -> None:
    labels = [f"{number:04}".rjust(length, "n")[-length:] for number in range(10 if length == 1 else 400)]
    hub.fleet.rename({node_id(number): NodeName(TENANT, label) for number, label in enumerate(labels)})
    text = instructions(hub.fleet, READERS, view)
    assert text.isascii()
    assert len(text) <= MAX_BYTES
    if length > 1:
        assert text.endswith(", and more, which fleet://nodes lists.")
        assert len(text) > MAX_BYTES - length - (10 if view is View.KINDS else 10 + len(f" ({NODE_ID})"))


def test_labels_beyond_ascii_are_named_in_their_letters_within_the_bytes(hub: Hub) -> None:
    hub.fleet.rename({NODE_ID: NodeName(TENANT, "Gewächshaus")})
    assert instructions(hub.fleet, READERS, View.KINDS).endswith('"Gewächshaus".')
    labels = {node_id(number): NodeName(TENANT, f"温室の北側ポンプ {number:03}") for number in range(100)}
    hub.fleet.rename(labels)
    text = instructions(hub.fleet, READERS, View.KINDS)
    assert MAX_BYTES - 60 < len(text.encode()) <= MAX_BYTES
    assert text.endswith("which fleet://nodes lists.")
