"""Attack: a second agent of the same tenant has the ids of another's session and request, and uses them.

What must happen: every answer is, byte for byte but for the correlation id, that to ids which never existed;
the session goes on, its request is still pending, and none of its events reaches the attacker.
"""

import json
import re
from typing import Any

import pytest

from tests.fakes.caller_stage import SCOPE, TOOLS, request_id
from tests.fakes.mcp_wire import NEW, OLD, McpWire
from tests.fakes.served_relay import ServedRelay
from tests.fakes.signer import NODE_ID

pytestmark = pytest.mark.asyncio(loop_scope="module")

NEVER = "gogol_20251010_085320_00000000"
CORRELATION_ID = re.compile(rb"[0-9A-HJKMNP-TV-Z]{26}")
CONTEXT = {"caller_id": "ant", "caller_tools": list(TOOLS)}
USES: list[tuple[str, dict[str, Any]]] = [
    ("session_events", {"wait_ms": 0}),
    ("session_events", {"wait_ms": 0, "after": 0, "stream": True}),
    ("session_message", {"message": "Hello"}),
    ("session_message", {"end": True}),
    ("session_message", {"context": {"caller_tools": []}}),
    ("session_message", {"node_id": NODE_ID}),
    ("caller_tool_response", {"request_id": request_id(), "result": "mine"}),
    ("caller_tool_response", {"request_id": request_id(), "error": "mine"}),
]


@pytest.mark.parametrize("era", [OLD, NEW])
@pytest.mark.parametrize("attacker", [{"sub": "mallory"}, {"tenant": "globex"}], ids=["agent", "tenant"])
async def test_it_cannot_be_told_from_one_that_does_not_exist(
    relay: ServedRelay, era: str, attacker: dict[str, Any]
) -> None:
    hub = relay.hub
    owner, thief = hub.token([SCOPE]), hub.token([SCOPE], **attacker)
    async with (
        relay.session(hub.ca.issue()) as node,
        McpWire.open(relay.address, era, owner) as caller,
        McpWire.open(relay.address, era, thief) as mallory,
    ):
        opened = await caller.ask(caller.request("session_message", {"node_id": NODE_ID, "context": CONTEXT}))
        session_id = opened["result"]["structuredContent"]["session_id"]
        await node.receive("session_open")
        payload = {"session_id": session_id, "request_id": request_id(), "tool": "get_memory"}
        await node.send("caller_tool", {**payload, "arguments": {"secret": "correct-horse"}})
        polled = await caller.ask(caller.request("session_events", {"session_id": session_id}))
        assert len(polled["result"]["structuredContent"]["events"]) == 1
        for name, arguments in USES:
            answers = [
                await answer_of(mallory, name, {**arguments, "session_id": wanted})
                for wanted in (session_id, NEVER)
            ]
            assert answers[0] == answers[1]
            assert b"correct-horse" not in answers[0]
        answer = {"session_id": session_id, "request_id": request_id(), "result": "the owner's"}
        await caller.ask(caller.request("caller_tool_response", answer))
        assert (await node.receive("caller_tool_result")).payload["result"] == "the owner's"


async def answer_of(wire: McpWire, name: str, arguments: dict[str, Any]) -> bytes:
    """Return the body of an answer without its correlation ids."""
    headers = {"mcp-name": name} if wire.era == NEW else {}
    response = await wire.post(json.dumps(wire.request(name, arguments)).encode(), **headers)
    assert response.status_code == 200
    assert b'"isError":true' in response.content
    return CORRELATION_ID.sub(b"-", response.content)
