"""Attacker: an agent with a good token of another tenant on the same relay. Tried: to learn whether a node is
there, what it can do and when it comes and goes: by listing, by calling under both forms of a name, by
reading resources, by listening for changes, and by taking up another agent's session.

What must happen: nothing of it is listed, ``E_SAFETY_DENIED`` byte for byte as for a node that exists
nowhere, and a ``deny`` line under the caller's own tenant. Changes elsewhere cause no notification.
"""

import asyncio
import json
import re
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from relay.fleet.node_record import Where
from tests.fakes.served_relay import BOUND_S, Reply, ServedRelay, mcp_request
from tests.fakes.signer import NODE_ID, OTHER_NODE_ID, TTL_MS, SimulatedNode

pytestmark = pytest.mark.asyncio(loop_scope="module")

NOWHERE = "01hzx9k3m4p7q8r9s0t1v2w3x0"
THEIRS = "globex"
CHANGED = "notifications/tools/list_changed"
_CORRELATION = re.compile(rb"[0-9A-HJKMNP-TV-Z]{26}")


def unconnected(_doors: ServedRelay) -> None:
    """The node has announced itself, and there is no session."""


def expired(relay: ServedRelay) -> None:
    relay.hub.clock.advance(TTL_MS)


def rejected(relay: ServedRelay) -> None:
    relay.hub.fleet.offer_manifest(NODE_ID, b"{}", "broker")


def tombstoned(relay: ServedRelay) -> None:
    relay.hub.fleet.tombstone(NODE_ID)


STATES: list[Callable[[ServedRelay], None]] = [unconnected, expired, rejected, tombstoned]
NAMES = [
    pytest.param("sysecho.{}.echo.invoke", id="a tool that it has"),
    pytest.param("sysecho-{}-echo-invoke", id="in its dashed form"),
    pytest.param("sys.{}.sysmetrics.snapshot", id="another"),
    pytest.param("sysecho.{}.nothing.invoke", id="a capability that it has not"),
    pytest.param("sysecho.{}.echo.nothing", id="a verb that it has not"),
    pytest.param("nokind.{}.echo.invoke", id="a kind that is none"),
]


def without_ids(reply: Reply, node_id: str) -> tuple[int, dict[str, str], bytes]:
    """Return all of ``reply`` but what must differ: the time, the correlation id and the node's id."""
    headers = {name: value for name, value in reply.headers.items() if name != "date"}
    return reply.status, headers, _CORRELATION.sub(b"", reply.body).replace(node_id.encode(), b"<node>")


async def same_as_nowhere(relay: ServedRelay, name: str, arguments: dict[str, Any]) -> None:
    token = relay.hub.token(tenant=THEIRS)
    params = [{"name": name.format(node_id), "arguments": arguments} for node_id in (NODE_ID, NOWHERE)]
    here, nowhere = [await relay.mcp("tools/call", each, token=token) for each in params]
    assert here.error()["code"] == "E_SAFETY_DENIED"
    assert without_ids(here, NODE_ID) == without_ids(nowhere, NOWHERE)
    assert relay.calls() == [("deny", "E_SAFETY_DENIED", NODE_ID), ("deny", "E_SAFETY_DENIED", NOWHERE)]
    lines = [
        {**line, "tool": "", "node_id": "", "correlation_id": "", "prev": ""} for line in relay.hub.audited()
    ]
    assert lines[0] == lines[1]
    assert lines[0]["tenant"] == THEIRS


@pytest.mark.parametrize("name", NAMES)
async def test_a_call_is_answered_as_for_a_node_that_is_nowhere(
    relay: ServedRelay, node: SimulatedNode, name: str
) -> None:
    async with relay.session(node):
        await same_as_nowhere(relay, name, {"message": "ping"})


@pytest.mark.parametrize("arguments", [{}, {"message": 7}, {"message": "x" * 2000}, {"more": "than wanted"}])
async def test_bad_arguments_are_not_told_from_good_ones(
    relay: ServedRelay, node: SimulatedNode, arguments: dict[str, Any]
) -> None:
    async with relay.session(node):
        await same_as_nowhere(relay, "sysecho.{}.echo.invoke", arguments)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", NAMES)
async def test_what_befalls_a_node_makes_no_difference(
    relay: ServedRelay, node: SimulatedNode, name: str, state: Callable[[ServedRelay], None]
) -> None:
    relay.hub.announce(node)
    state(relay)
    await same_as_nowhere(relay, name, {"message": "ping"})


async def test_a_node_of_which_only_the_leaf_is_known_makes_no_difference(
    relay: ServedRelay, node: SimulatedNode
) -> None:
    relay.hub.fleet.offer_identity(NODE_ID, node.leaf_pem)
    await same_as_nowhere(relay, "sysecho.{}.echo.invoke", {"message": "ping"})


@pytest.mark.parametrize("query", ["", "?names=dashed"])
@pytest.mark.parametrize(
    "method", ["tools/list", "resources/list", "resources/templates/list", "prompts/list"]
)
async def test_nothing_of_it_is_listed(
    relay: ServedRelay, node: SimulatedNode, method: str, query: str
) -> None:
    token = relay.hub.token(tenant=THEIRS)
    before = await relay.mcp(method, token=token, path=f"/mcp{query}")
    async with relay.session(node):
        during = await relay.mcp(method, token=token, path=f"/mcp{query}")
    assert before.status == during.status == 200
    assert before.body == during.body
    assert NODE_ID.encode() not in during.body


async def test_the_list_of_nodes_holds_ones_own(relay: ServedRelay, node: SimulatedNode) -> None:
    own = relay.hub.ca.issue(OTHER_NODE_ID, THEIRS)
    async with relay.session(node), relay.session(own):
        token = relay.hub.token(tenant=THEIRS)
        reply = await relay.mcp("resources/read", {"uri": "fleet://nodes"}, token=token)
        nodes = json.loads(reply.json()["result"]["contents"][0]["text"])["nodes"]
    assert [listed["node_id"] for listed in nodes] == [OTHER_NODE_ID]
    assert NODE_ID.encode() not in reply.body


@pytest.mark.parametrize("part", ["manifest", "identity", "telemetry", "", "manifest/..", "../" + NODE_ID])
async def test_a_resource_is_answered_as_for_a_node_that_is_nowhere(
    relay: ServedRelay, node: SimulatedNode, part: str
) -> None:
    token = relay.hub.token(tenant=THEIRS)
    async with relay.session(node):
        here, nowhere = [
            await relay.mcp("resources/read", {"uri": f"node://{node_id}/{part}"}, token=token)
            for node_id in (NODE_ID, NOWHERE)
        ]
    assert "error" in here.json()
    assert without_ids(here, NODE_ID) == without_ids(
        Reply(nowhere.status, nowhere.headers, nowhere.body.replace(NOWHERE.encode(), NODE_ID.encode())),
        NODE_ID,
    )


async def in_the_old_era(
    relay: ServedRelay, verb: str, message: dict[str, Any], token: str, session: str | None = None
) -> Reply:
    """Send ``message`` as a client of 2025 does, in ``session``."""
    headers = [
        ("Content-Type", "application/json"),
        ("Accept", "application/json, text/event-stream"),
        ("Authorization", f"Bearer {token}"),
    ]
    if session is not None:
        headers += [("Mcp-Session-Id", session), ("MCP-Protocol-Version", "2025-11-25")]
    return await relay.ask(f"{verb} /mcp", headers, json.dumps({"jsonrpc": "2.0", **message}).encode())


@pytest.mark.parametrize("verb", ["POST", "GET", "DELETE"])
async def test_a_session_of_another_agent_is_answered_as_one_that_is_not_there(
    relay: ServedRelay, verb: str
) -> None:
    client = {
        "protocolVersion": "2025-11-25",
        "capabilities": {},
        "clientInfo": {"name": "a", "version": "0"},
    }
    hello = {"id": 1, "method": "initialize", "params": client}
    owners = relay.hub.token()
    session = (await in_the_old_era(relay, "POST", hello, owners)).headers["mcp-session-id"]
    listing = {"id": 2, "method": "tools/list"}
    spying = [relay.hub.token(tenant=THEIRS), relay.hub.token(sub="another")]
    for token in spying:
        taken = await in_the_old_era(relay, verb, listing, token, session)
        absent = await in_the_old_era(relay, verb, listing, token, "0" * len(session))
        assert taken.status == 404
        assert (taken.status, taken.body) == (absent.status, absent.body)
    assert (await in_the_old_era(relay, "POST", listing, owners, session)).status == 200


class Listener:
    """An agent that listens for changes."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader

    async def next(self) -> dict[str, Any]:
        async with asyncio.timeout(BOUND_S):
            while not (line := await self._reader.readline()).startswith(b"data: {"):
                assert line
        message: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
        return message

    @classmethod
    async def of(cls, relay: ServedRelay, tenant: str, stack: AsyncExitStack) -> "Listener":
        """Begin to listen as an agent of ``tenant``."""
        body, headers = mcp_request("subscriptions/listen", {"notifications": {"toolsListChanged": True}})
        headers += [
            ("Authorization", f"Bearer {relay.hub.token(tenant=tenant)}"),
            ("Host", str(relay.address)),
        ]
        headers += [("Content-Length", str(len(body)))]
        reader, writer = await relay.connect()
        stack.callback(writer.close)
        lines = ["POST /mcp HTTP/1.1", *(f"{name}: {value}" for name, value in headers)]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        async with asyncio.timeout(BOUND_S):
            head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        listener = cls(reader)
        assert (await listener.next())["method"] == "notifications/subscriptions/acknowledged"
        return listener


async def test_a_change_notifies_no_other_tenant(relay: ServedRelay, node: SimulatedNode) -> None:
    async with AsyncExitStack() as stack:
        spy = await Listener.of(relay, THEIRS, stack)
        owner = await Listener.of(relay, node.tenant, stack)
        heard = asyncio.create_task(spy.next())
        relay.hub.connect(node)
        assert (await owner.next())["method"] == CHANGED
        relay.hub.fleet.connection_changed(NODE_ID, Where.NOWHERE)
        relay.hub.clock.advance(60_000)
        # Notified in the second round; the first one has covered all other tenants too.
        assert (await owner.next())["method"] == CHANGED
        await relay.mcp("tools/list", token=relay.hub.token(tenant=THEIRS))
        assert not heard.done()
        relay.hub.connect(relay.hub.ca.issue(OTHER_NODE_ID, THEIRS), issued_at_ms=relay.hub.clock())
        assert (await heard)["method"] == CHANGED
