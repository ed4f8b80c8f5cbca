import json
from pathlib import Path
from typing import Any

import pytest

from kubelet.caller_tools import server as client_module
from kubelet.caller_tools.json_rpc import INVALID_PARAMS, MAX_LINE_BYTES
from kubelet.caller_tools.server import MAX_IN_FLIGHT
from schemas.caller_tools import MAX_PENDING
from schemas.registry import SchemaRegistry
from tests.fakes.caller_tools import ANT, BEE, MEMORY, SEND, FakeRelay, SocketClient, connected, served
from tests.fakes.lines import LogLines
from tests.fakes.polling import until

IDS = ("session_id", "request_id")
LENT = {**MEMORY, "inputSchema": {"type": "object"}}


def config(*tools: Any, caller_id: str = "ant") -> dict[str, Any]:
    return {"type": "caller_tools_config", "params": {"caller_id": caller_id, "tools": list(tools)}}


async def test_a_client_that_is_connected_is_notified_of_lent_tools(
    relay: FakeRelay, client: SocketClient
) -> None:
    relay.open()
    assert await client.notification() == config(LENT)


async def test_a_client_that_connects_later_is_too(relay: FakeRelay, path: Path) -> None:
    relay.open(ANT, "ant", MEMORY, SEND)
    async with connected(path) as client:
        assert await client.notification() == config(LENT, SEND)


async def test_it_is_notified_again_at_every_change(relay: FakeRelay, client: SocketClient) -> None:
    relay.open()
    relay.open()
    relay.open(ANT, "ant", SEND)
    relay.end()
    assert [await client.notification() for _ in range(3)] == [config(LENT), config(SEND), config()]


async def test_a_second_session_withdraws_what_an_unattached_client_had(
    relay: FakeRelay, client: SocketClient
) -> None:
    relay.open()
    relay.open(BEE, "bee")
    relay.end()
    assert [await client.notification() for _ in range(3)] == [
        config(LENT),
        config(),
        config(LENT, caller_id="bee"),
    ]


async def test_an_attached_client_sees_its_session_alone(relay: FakeRelay, path: Path) -> None:
    relay.open()
    relay.open(BEE, "bee", SEND)
    async with connected(path) as client:
        attached = await client.request("session_attach", {"session_id": BEE})
        assert attached["result"] == {"session_id": BEE, "caller_id": "bee"}
        assert await client.notification() == config(SEND, caller_id="bee")
        relay.end(ANT)
        relay.end(BEE)
        assert await client.notification() == config(caller_id="bee")


async def test_a_request_that_is_cancelled_gives_its_place_back_and_gets_no_response(
    relay: FakeRelay, client: SocketClient
) -> None:
    relay.open()
    asked = client.send("caller_tool", {"tool": "get_memory"})
    [sent] = await relay.requests()
    assert (await client.request("cancel", {"id": asked}))["result"] == {"cancelled": True}
    await until(lambda: relay.of("caller_tool_cancel") == [{name: sent[name] for name in IDS}])
    assert (await client.request("cancel", {"id": asked}))["result"] == {"cancelled": False}
    again = client.send("caller_tool", {"tool": "get_memory"}, asked)
    relay.answer((await relay.requests(2))[1], "the second")
    assert (await client.response(again))["result"] == "the second"


async def test_a_request_is_cancelled_however_many_are_in_flight(
    relay: FakeRelay, client: SocketClient
) -> None:
    relay.open()
    asked = [client.send("caller_tool", {"tool": "get_memory"}) for _ in range(MAX_IN_FLIGHT)]
    await relay.requests(MAX_PENDING)
    for each in asked:
        assert (await client.request("cancel", {"id": each}))["result"] == {"cancelled": True}
    await until(lambda: len(relay.of("caller_tool_cancel")) == len(relay.of("caller_tool")))
    answered = client.send("caller_tool", {"tool": "get_memory"})
    relay.answer((await relay.requests(len(relay.of("caller_tool_cancel")) + 1))[-1], "at once")
    assert (await client.response(answered))["result"] == "at once"


@pytest.mark.parametrize("params", [{}, {"id": None}, {"id": 1, "tool": "get_memory"}])
async def test_what_is_to_be_cancelled_is_named_by_its_id(
    client: SocketClient, params: dict[str, Any]
) -> None:
    assert (await client.request("cancel", params))["error"]["code"] == INVALID_PARAMS


async def test_messages_of_the_caller_are_notified(relay: FakeRelay, client: SocketClient) -> None:
    relay.open()
    await client.notification()
    relay.give("session_message", {"session_id": ANT, "message": "hello"})
    assert await client.notification() == {
        "type": "session_message",
        "params": {"session_id": ANT, "message": "hello"},
    }


async def test_messages_without_a_client_are_kept_for_the_next_one(relay: FakeRelay, path: Path) -> None:
    relay.open()
    relay.give("session_message", {"session_id": ANT, "message": "hello"})
    async with connected(path) as first:
        await first.notification()
        assert (await first.notification())["params"]["message"] == "hello"
    async with connected(path) as second:
        assert await second.notification() == config(LENT)
        relay.end()
        assert await second.notification() == config()


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"{", -32700),
        (b"\x00\x01\x02", -32700),
        (b"[]", -32600),
        (b"x" * (MAX_LINE_BYTES + 1), -32600),
    ],
)
async def test_what_is_no_request_gets_an_error_and_the_connection_goes_on(
    client: SocketClient, line: bytes, code: int
) -> None:
    client.writer.write(line + b"\n")
    assert (await client.response(None))["error"]["code"] == code
    assert "result" in await client.request("node")


async def test_the_longest_line_is_read(relay: FakeRelay, client: SocketClient) -> None:
    relay.open()
    request = {"jsonrpc": "2.0", "id": 1, "method": "node", "params": {}}
    line = json.dumps(request).encode()
    client.writer.write(line + b" " * (MAX_LINE_BYTES - len(line)) + b"\n")
    assert "result" in await client.response(1)


async def test_an_unknown_method_gets_an_error_and_the_connection_goes_on(client: SocketClient) -> None:
    assert (await client.request("no_such_method"))["error"]["code"] == -32601
    assert "result" in await client.request("node")


async def test_a_duplicate_id_gets_an_error_and_the_first_request_goes_on(
    relay: FakeRelay, client: SocketClient
) -> None:
    relay.open()
    client.send("caller_tool", {"tool": "get_memory", "arguments": {}}, "same")
    client.send("node", {}, "same")
    error = (await client.response(None))["error"]
    assert error["code"] == -32600
    [request] = await relay.requests()
    relay.answer(request, "first")
    assert (await client.response("same"))["result"] == "first"


async def test_an_id_may_be_used_again_when_its_request_has_ended(client: SocketClient) -> None:
    for _ in range(2):
        client.send("node", {}, "same")
        assert "result" in await client.response("same")


async def test_a_notification_of_a_client_gets_no_response(client: SocketClient) -> None:
    client.writer.write(b'{"jsonrpc":"2.0","method":"node"}\n\n \n')
    assert (await client.request("node"))["id"] == 1


async def test_two_hundred_requests_in_flight_are_answered_in_any_order(
    relay: FakeRelay, client: SocketClient
) -> None:
    relay.open()
    count = 200
    for number in range(count):
        client.send("caller_tool", {"tool": "get_memory", "arguments": {"n": number}}, number)
    answered = 0
    while answered < count:
        requests = await relay.requests(answered + 1)
        for request in reversed(requests[answered:]):
            relay.answer(request, request["arguments"]["n"])
        answered = len(requests)
    assert [(await client.response(number))["result"] for number in range(count)] == list(range(count))


async def test_beyond_the_limit_of_one_connection_they_are_refused_at_once(
    relay: FakeRelay, client: SocketClient
) -> None:
    relay.open()
    for number in range(MAX_IN_FLIGHT + 1):
        client.send("caller_tool", {"tool": "get_memory"}, number)
    error = (await client.response(MAX_IN_FLIGHT))["error"]
    assert relay.tools.counts["requests_refused"] == 1
    assert error["data"]["code"] == "E_RATE_LIMITED"
    assert error["data"]["retry_after_ms"] > 0


async def test_a_client_that_disconnects_cancels_its_requests(relay: FakeRelay, path: Path) -> None:
    relay.open()
    async with connected(path) as client:
        client.send("caller_tool", {"tool": "get_memory"})
        await relay.requests()
    await until(lambda: relay.of("caller_tool_cancel"))


async def test_a_client_that_does_not_read_is_disconnected(
    relay: FakeRelay, client: SocketClient, log: LogLines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "MAX_UNSENT_BYTES", 1 << 17)
    relay.open()
    message = "x" * 190_000
    for _ in range(8):
        relay.give("session_message", {"session_id": ANT, "message": message})
    await log.until("local client disconnected: it does not read what it is sent")
    assert relay.tools.counts["clients_that_do_not_read"] == 1
    async with connected(Path(client.writer.get_extra_info("peername"))) as other:
        assert "result" in await other.request("node")


async def test_a_bug_costs_one_request(
    relay: FakeRelay, client: SocketClient, log: LogLines, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("kubelet.caller_tools.requests.CallerRequests.request", broken)
    relay.open()
    response = await client.request("caller_tool", {"tool": "get_memory"})
    assert response["error"]["data"]["code"] == "E_INTERNAL"
    assert log.entries("request of a local client failed")
    assert "result" in await client.request("node")


async def test_a_flood_of_lines_is_slowed(
    path: Path, registry: SchemaRegistry, log: LogLines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_LINES_AT_ONCE", 20.0)
    async with served(path, registry, log) as relay, connected(path) as client:
        client.writer.write(b"\n" * 60)
        assert "result" in await client.request("node")
        assert relay.tools.counts["clients_slowed"] > 0
