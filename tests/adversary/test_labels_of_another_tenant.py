"""Attacker: an agent with a good token of another tenant on the same relay. Tried: to learn what the operator
calls a node of the first tenant, or that it has a name at all: by lists in every view, resources,
instructions, changes, selectors in the URL and in arguments, and by names that are nearly right.

What must happen: every answer is, byte for byte, what it was before that node had a name; the owner's answers
change.
"""

import asyncio
import json
import re
from typing import Any

import pytest

from relay.auth.permissions import Rights
from schemas.labels import NodeName
from tests.fakes.served_relay import ServedRelay
from tests.fakes.signer import NODE_ID, OTHER_NODE_ID, TENANT, SimulatedNode

pytestmark = pytest.mark.asyncio(loop_scope="module")

THEIRS = "globex"
NAME = NodeName(TENANT, "secret plan", ("project=manhattan", "nuclear"))
# A correlation id; and of a call, the time of the answer.
_VARYING = re.compile(rb"[0-9A-HJKMNP-TV-Z]{26}")

REFERENCES = ("secret plan", "secret plam", "Secret Plan", "secret", NODE_ID, NODE_ID[:25], "secret%20plan")
SELECTORS = ("project=manhattan", "project=manhatta", "tag:nuclear", "tag:nuclea", "*")


def calls() -> list[tuple[str, dict[str, Any], str]]:
    """Return the requests by which a name could be learnt: method, parameters, path."""
    kinds = "/mcp?view=kinds"
    asked: list[tuple[str, dict[str, Any], str]] = [
        ("server/discover", {}, "/mcp"),
        ("resources/list", {}, "/mcp"),
        ("resources/read", {"uri": "fleet://nodes"}, "/mcp"),
        ("resources/read", {"uri": "fleet://changes?since_ms=0"}, "/mcp"),
        *(("tools/list", {}, f"/mcp{query}") for query in ("", "?names=dashed", "?view=kinds")),
    ]
    for reference in REFERENCES:
        asked.append(("resources/read", {"uri": f"node://{reference}/manifest"}, "/mcp"))
        echo = {"name": "sysecho.invoke", "arguments": {"message": "x", "node": reference}}
        asked.append(("tools/call", echo, kinds))
        find = {"name": "find_nodes", "arguments": {"query": reference}}
        asked.append(("tools/call", find, kinds))
        asked.append(("tools/list", {}, f"/mcp?nodes={reference.replace(' ', '%20')}"))
    for selector in SELECTORS:
        many = {"name": "sysecho.invoke", "arguments": {"message": "x", "nodes": [selector]}}
        asked.append(("tools/call", many, kinds))
        asked.append(("tools/list", {}, f"/mcp?tags={selector.removeprefix('tag:')}"))
    return asked


async def answers(relay: ServedRelay, tenant: str) -> list[bytes]:
    """Return what each request is answered with, without what differs from time to time."""
    token = relay.hub.token(tenant=tenant)
    found: list[bytes] = []
    for method, params, path in calls():
        reply = await relay.mcp(method, params, token=token, path=path)
        found.append(_VARYING.sub(b"", reply.body))
    return found


async def test_no_answer_to_another_tenant_depends_on_a_name(relay: ServedRelay, node: SimulatedNode) -> None:
    relay.hub.connect(node)
    relay.hub.connect(relay.hub.ca.issue(OTHER_NODE_ID, THEIRS))
    relay.hub.fleet.rename({OTHER_NODE_ID: NodeName(THEIRS, "second plan", ("project=apollo",))})
    before, owners_before = await answers(relay, THEIRS), await answers(relay, TENANT)
    relay.hub.fleet.rename({NODE_ID: NAME})
    after, owners_after = await answers(relay, THEIRS), await answers(relay, TENANT)
    for request, was, now in zip(calls(), before, after, strict=True):
        assert now == was, request
    # The requests can show a name: its owner's answers to many of them have changed.
    assert sum(was != now for was, now in zip(owners_before, owners_after, strict=True)) >= 20


async def test_a_label_of_another_tenant_is_free(relay: ServedRelay, node: SimulatedNode) -> None:
    relay.hub.connect(node)
    relay.hub.connect(relay.hub.ca.issue(OTHER_NODE_ID, THEIRS))
    relay.hub.fleet.rename({NODE_ID: NAME, OTHER_NODE_ID: NodeName(THEIRS, "secret plan")})
    for tenant, node_id in ((TENANT, NODE_ID), (THEIRS, OTHER_NODE_ID)):
        assert relay.hub.fleet.names.resolve(tenant, "secret plan") == node_id
        token = relay.hub.token(tenant=tenant)
        reply = await relay.mcp("resources/read", {"uri": "fleet://nodes"}, token=token)
        nodes = json.loads(reply.json()["result"]["contents"][0]["text"])["nodes"]
        assert [(each["node_id"], each["label"]) for each in nodes] == [(node_id, "secret plan")]


async def test_a_name_notifies_its_own_tenant_alone(relay: ServedRelay, node: SimulatedNode) -> None:
    heard: dict[str, asyncio.Event] = {}

    def ear(tenant: str) -> asyncio.Event:
        heard[tenant] = asyncio.Event()

        async def listener() -> None:
            heard[tenant].set()

        relay.notifier.listen(Rights(tenant, frozenset({"read_only"})), listener)
        return heard[tenant]

    relay.hub.connect(node)
    own, theirs = ear(TENANT), ear(THEIRS)
    relay.hub.fleet.rename({NODE_ID: NAME})
    await asyncio.wait_for(own.wait(), 30)
    assert not theirs.is_set()
