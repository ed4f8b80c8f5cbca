from pathlib import Path
from typing import Any

import pytest

from tests.fakes.caller_tools import ANT, BEE, MEMORY, OTHER_OWNER, SEND, FakeRelay, SocketClient, connected
from tests.fakes.signer import NODE_ID

CALL = {"tool": "get_memory", "arguments": {}}


async def code_of(client: SocketClient, method: str, params: Any = None) -> str:
    """Return the code of RFC-0001 section 4 with which a request fails."""
    return str((await client.request(method, params))["error"]["data"]["code"])


async def test_a_lent_tool_is_requested_and_answered(relay: FakeRelay, client: SocketClient) -> None:
    relay.open(ANT, "ant", SEND)
    arguments = {"message": "Hello", "recipients": ["+1234567890"]}
    id_ = client.send("caller_tool", {"tool": "send_response", "arguments": arguments})
    [request] = await relay.requests()
    assert (request["session_id"], request["tool"], request["arguments"]) == (ANT, "send_response", arguments)
    relay.answer(request, {"sent": True})
    assert await client.response(id_) == {"jsonrpc": "2.0", "id": id_, "result": {"sent": True}}


async def test_arguments_may_be_left_out(relay: FakeRelay, client: SocketClient) -> None:
    relay.open()
    client.send("caller_tool", {"tool": "get_memory"})
    assert (await relay.requests())[0]["arguments"] == {}


async def test_a_tool_that_is_not_lent_is_refused_on_the_node(relay: FakeRelay, client: SocketClient) -> None:
    relay.open()
    assert await code_of(client, "caller_tool", {"tool": "send_response"}) == "E_VERB_UNSUPPORTED"
    assert relay.sent == []


async def test_without_a_session_no_tool_is_lent(client: SocketClient) -> None:
    assert await code_of(client, "caller_tool", CALL) == "E_VERB_UNSUPPORTED"


async def test_unattached_use_is_refused_the_moment_there_are_two_sessions(
    relay: FakeRelay, client: SocketClient
) -> None:
    relay.open()
    first = client.send("caller_tool", CALL)
    [request] = await relay.requests()
    relay.open(BEE, "bee", MEMORY, owner=OTHER_OWNER)
    response = await client.request("caller_tool", CALL)
    assert "More than one session is live" in response["error"]["message"]
    assert len(relay.of("caller_tool")) == 1
    # What was requested before goes to the session it was requested of.
    assert request["session_id"] == ANT
    relay.answer(request, "of the first")
    assert (await client.response(first))["result"] == "of the first"


async def test_an_attached_connection_reaches_its_own_session_whatever_else_is_live(
    relay: FakeRelay, path: Path
) -> None:
    relay.open()
    relay.open(BEE, "bee", MEMORY, owner=OTHER_OWNER)
    async with connected(path) as ant, connected(path) as bee:
        await ant.request("session_attach", {"session_id": ANT})
        await bee.request("session_attach", {"session_id": BEE})
        bee.send("caller_tool", CALL)
        ant.send("caller_tool", {**CALL, "arguments": {"from": "ant"}})
        requests = await relay.requests(2)
    assert {request["session_id"]: request["arguments"] for request in requests} == {
        ANT: {"from": "ant"},
        BEE: {},
    }


async def test_an_ended_session_is_not_followed_by_another(relay: FakeRelay, client: SocketClient) -> None:
    relay.open()
    await client.request("session_attach", {"session_id": ANT})
    relay.end(ANT)
    relay.open(BEE, "bee")
    assert await code_of(client, "caller_tool", CALL) == "E_SAFETY_DENIED"
    assert relay.of("caller_tool") == []


async def test_a_request_that_names_its_caller_is_not_redirected_to_the_next(
    relay: FakeRelay, client: SocketClient
) -> None:
    relay.open(BEE, "bee")
    assert await code_of(client, "caller_tool", {**CALL, "caller_id": "ant"}) == "E_VERB_UNSUPPORTED"
    assert relay.of("caller_tool") == []


async def test_to_attach_to_no_live_session_is_refused(client: SocketClient) -> None:
    assert await code_of(client, "session_attach", {"session_id": ANT}) == "E_SAFETY_DENIED"


async def test_a_connection_is_attached_once(relay: FakeRelay, client: SocketClient) -> None:
    relay.open()
    relay.open(BEE, "bee")
    assert "result" in await client.request("session_attach", {"session_id": ANT})
    assert "result" in await client.request("session_attach", {"session_id": ANT})
    assert (await client.request("session_attach", {"session_id": BEE}))["error"]["code"] == -32602


async def test_a_reply_goes_to_the_sessions_caller(relay: FakeRelay, client: SocketClient) -> None:
    relay.open()
    assert (await client.request("session_reply", {"message": "done"}))["result"] == {}
    assert relay.of("session_event") == [{"session_id": ANT, "message": "done"}]


async def test_a_reply_without_a_connection_to_the_relay_is_an_error(
    relay: FakeRelay, client: SocketClient
) -> None:
    relay.open()
    relay.is_up = False
    response = await client.request("session_reply", {"message": "done"})
    assert response["error"]["message"] == "The relay is not reached; nothing was sent."


async def test_a_reply_has_a_size(relay: FakeRelay, client: SocketClient) -> None:
    relay.open()
    code = await code_of(client, "session_reply", {"message": "x" * (192 * 1024)})
    assert code == "E_MANIFEST_INVALID"
    assert relay.sent == []


async def test_a_reply_needs_one_session(relay: FakeRelay, client: SocketClient) -> None:
    relay.open()
    relay.open(BEE, "bee")
    assert await code_of(client, "session_reply", {"message": "to whom"}) == "E_VERB_UNSUPPORTED"


async def test_the_node_names_itself(client: SocketClient) -> None:
    assert (await client.request("node"))["result"] == {"node_id": NODE_ID}


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("caller_tool", {}),
        ("caller_tool", {"tool": 1}),
        ("caller_tool", {"tool": "get_memory", "arguments": [1]}),
        ("caller_tool", {"tool": "get_memory", "arguments": {}, "session_id": ANT}),
        ("caller_tool", {"tool": "get_memory", "caller_id": 1}),
        ("session_attach", {}),
        ("session_attach", {"session_id": 1}),
        ("session_reply", {}),
        ("session_reply", {"message": {}}),
        ("node", {"extra": 1}),
    ],
)
async def test_params_of_another_form_are_rejected(
    relay: FakeRelay, client: SocketClient, method: str, params: Any
) -> None:
    relay.open()
    assert (await client.request(method, params))["error"]["code"] == -32602
    assert relay.sent == []
