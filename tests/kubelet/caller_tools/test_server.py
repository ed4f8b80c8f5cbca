import asyncio
import json
import os
import socket
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import pytest

from kubelet.caller_tools import server
from kubelet.caller_tools.json_rpc import INVALID_PARAMS, MAX_LINE_BYTES
from kubelet.caller_tools.server import MAX_CLIENTS_OF_ONE_USER, MAX_IN_FLIGHT, Client
from kubelet.caller_tools.sessions import MAX_UNREAD
from kubelet.caller_tools.socket_file import Peer
from schemas.caller_tools import MAX_PENDING
from schemas.registry import SchemaRegistry
from tests.fakes.caller_tools import (
    ANT,
    BEE,
    BOUND_S,
    MEMORY,
    OTHER_OWNER,
    SEND,
    FakeRelay,
    SocketClient,
    connected,
    served,
)
from tests.fakes.lines import LogLines
from tests.fakes.polling import until
from tests.fakes.signer import NODE_ID


async def test_who_connects_is_logged(client: SocketClient, log: LogLines) -> None:
    await client.request("node")
    [entry] = log.entries("local client connected")
    assert (entry["pid"], entry["uid"], entry["gid"]) == (os.getpid(), os.geteuid(), os.getegid())


async def test_a_strangers_connection_is_closed_unread_and_logged(
    relay: FakeRelay, path: Path, log: LogLines, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = Peer(os.getpid(), os.geteuid() + 4711, os.getegid() + 4711)
    monkeypatch.setattr(server, "peer_of", lambda _: stranger)
    relay.open()
    async with connected(path) as client:
        assert await client.at_end()
    entry = await log.until("local client refused: neither its user nor its group may connect")
    assert entry["uid"] == stranger.uid
    assert relay.tools.counts["connections_refused"] == 1


async def test_one_user_has_so_many_connections(relay: FakeRelay, path: Path, log: LogLines) -> None:
    async with AsyncExitStack() as stack:
        for _ in range(MAX_CLIENTS_OF_ONE_USER):
            client = await stack.enter_async_context(connected(path))
            await client.request("node")
        async with connected(path) as one_more:
            assert await one_more.at_end()
        assert log.entries("local client refused: too many connections")
        assert "result" in await client.request("node")
    # A connection that has ended counts no more.
    await until(lambda: relay.tools.summary().startswith("0 sessions, 0 local clients"))
    async with connected(path) as again:
        assert "result" in await again.request("node")


async def test_a_connection_counts_until_what_its_client_does_not_read_is_dropped(
    relay: FakeRelay, path: Path, log: LogLines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_CLOSED_WITHIN_S", 0.5)
    relay.open()
    with ExitStack() as stack:
        for _ in range(MAX_CLIENTS_OF_ONE_USER):
            unread = stack.enter_context(socket.socket(socket.AF_UNIX))
            unread.settimeout(0)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(unread, str(path))
            await loop.sock_sendall(unread, b"x\n" * 3500)  # the answers are more than the kernel holds
            unread.shutdown(socket.SHUT_WR)
        async with connected(path) as one_more:
            assert await one_more.at_end()
        assert log.entries("local client refused: too many connections")
        await until(lambda: relay.tools.summary().startswith("1 sessions, 0 local clients"))


async def test_a_message_is_kept_where_the_only_client_is_being_disconnected(
    relay: FakeRelay, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_ending = asyncio.Event()

    async def ends_slowly(writer: asyncio.StreamWriter) -> None:
        writer.close()
        is_ending.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr(server, "_ended", ends_slowly)
        async with connected(path) as leaving:
            await leaving.request("node")
        await asyncio.wait_for(is_ending.wait(), BOUND_S)
    relay.open()
    relay.give("session_message", {"session_id": ANT, "message": "before it is gone"})
    async with connected(path) as next_one:
        assert (await next_one.notification())["type"] == "caller_tools_config"
        assert (await next_one.notification())["params"]["message"] == "before it is gone"


async def test_a_message_goes_to_every_client_of_its_session(relay: FakeRelay, path: Path) -> None:
    relay.open()
    async with connected(path) as first, connected(path) as second:
        await first.request("node")
        await second.request("node")
        relay.give("session_message", {"session_id": ANT, "message": "hello"})
        for client in (first, second):
            await client.notification()
            params = {"session_id": ANT, "message": "hello"}
            assert await client.notification() == {"type": "session_message", "params": params}


async def test_messages_that_are_not_read_are_counted_as_dropped(relay: FakeRelay, log: LogLines) -> None:
    relay.open()
    for number in range(MAX_UNREAD + 1):
        relay.give("session_message", {"session_id": ANT, "message": str(number)})
    assert relay.tools.counts["messages_dropped"] == 1
    assert log.entries("oldest message of a caller dropped: no local client reads it")


async def test_at_its_end_every_client_is_disconnected(
    path: Path, registry: SchemaRegistry, log: LogLines
) -> None:
    async with AsyncExitStack() as stack:
        async with served(path, registry, log) as relay:
            relay.open()
            client = await stack.enter_async_context(connected(path))
            client.send("caller_tool", {"tool": "get_memory"})
            await relay.requests()
        assert await client.at_end()


async def test_a_bug_costs_one_connection(
    relay: FakeRelay,  # noqa: ARG001 - it is served
    path: Path,
    log: LogLines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def broken(_: object) -> None:
        await asyncio.sleep(0)
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(Client, "run", broken)
        async with connected(path) as client:
            assert await client.at_end()
    assert log.entries("connection of a local client failed")
    async with connected(path) as client:
        assert "result" in await client.request("node")


IDS = ("session_id", "request_id")
LENT = {**MEMORY, "inputSchema": {"type": "object"}}


def config(*tools: Any, caller_id: str = "ant") -> dict[str, Any]:
    return {"type": "caller_tools_config", "params": {"caller_id": caller_id, "tools": list(tools)}}


@pytest.mark.holds("CALLER-TOOLS/data/config-notification")
async def test_a_client_that_is_connected_is_notified_of_lent_tools(
    relay: FakeRelay, client: SocketClient
) -> None:
    relay.open()
    assert await client.notification() == config(LENT)


@pytest.mark.holds("CALLER-TOOLS/data/config-notification")
async def test_a_client_that_connects_later_is_too(relay: FakeRelay, path: Path) -> None:
    relay.open(ANT, "ant", MEMORY, SEND)
    async with connected(path) as client:
        assert await client.notification() == config(LENT, SEND)


@pytest.mark.holds("CALLER-TOOLS/data/config-notification")
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


async def test_messages_are_kept_from_a_client_that_attaches_to_a_session_that_is_not_live_yet(
    relay: FakeRelay, path: Path
) -> None:
    relay.open()
    relay.give("session_message", {"session_id": ANT, "message": "before"})
    async with connected(path) as bee, connected(path) as ant:
        assert await code_of(bee, "session_attach", {"session_id": BEE}) == "E_SAFETY_DENIED"
        relay.give("session_message", {"session_id": ANT, "message": "after"})
        await ant.request("session_attach", {"session_id": ANT})
        assert await ant.notification() == config(LENT)
        texts = [(await ant.notification())["params"]["message"] for _ in range(2)]
        assert texts == ["before", "after"]
        relay.open(BEE, "bee", SEND)
        await bee.request("session_attach", {"session_id": BEE})
        relay.give("session_message", {"session_id": BEE, "message": "for bee"})
        assert [await bee.notification() for _ in range(3)] == [
            config(LENT),
            config(),
            config(SEND, caller_id="bee"),
        ]
        assert (await bee.notification())["params"] == {"session_id": BEE, "message": "for bee"}


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


async def test_the_messages_that_were_kept_do_not_disconnect_the_client_that_reads_them(
    relay: FakeRelay, path: Path
) -> None:
    relay.open()
    for _ in range(MAX_UNREAD):
        relay.give("session_message", {"session_id": ANT, "message": "\U0001f600" * 16_000})
    kept = MAX_UNREAD - relay.tools.counts["messages_dropped"]
    async with connected(path) as client:
        assert "result" in await client.request("node")
        assert await client.notification() == config(LENT)
        for _ in range(kept):
            assert (await client.notification())["type"] == "session_message"
    assert kept > 1


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
    relay.open()
    message = "x" * 190_000
    with monkeypatch.context() as patch:
        patch.setattr(server, "MAX_UNSENT_BYTES", 1 << 17)
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
    monkeypatch.setattr(server, "_LINES_AT_ONCE", 20.0)
    async with served(path, registry, log) as relay, connected(path) as client:
        client.writer.write(b"\n" * 60)
        assert "result" in await client.request("node")
        assert relay.tools.counts["clients_slowed"] > 0


CALL = {"tool": "get_memory", "arguments": {}}


async def code_of(client: SocketClient, method: str, params: Any = None) -> str:
    """Return the code of RFC-0001 section 4 with which a request fails."""
    return str((await client.request(method, params))["error"]["data"]["code"])


@pytest.mark.holds("CALLER-TOOLS/data/socket-protocol")
async def test_a_lent_tool_is_requested_and_answered(relay: FakeRelay, client: SocketClient) -> None:
    relay.open(ANT, "ant", SEND)
    arguments = {"message": "Hello", "recipients": ["+1234567890"]}
    id_ = client.send("caller_tool", {"tool": "send_response", "arguments": arguments})
    [request] = await relay.requests()
    assert (request["session_id"], request["tool"], request["arguments"]) == (ANT, "send_response", arguments)
    relay.answer(request, {"sent": True})
    assert await client.response(id_) == {"jsonrpc": "2.0", "id": id_, "result": {"sent": True}}


@pytest.mark.parametrize(
    ("callers", "method", "params", "code"),
    [
        pytest.param([], "caller_tool", CALL, "E_VERB_UNSUPPORTED", id="no session"),
        pytest.param(["ant"], "caller_tool", {"tool": "send_response"}, "E_VERB_UNSUPPORTED", id="not lent"),
        # A request that names its caller is not redirected to the next.
        pytest.param(
            ["bee"], "caller_tool", {**CALL, "caller_id": "ant"}, "E_VERB_UNSUPPORTED", id="of another caller"
        ),
        pytest.param([], "session_attach", {"session_id": ANT}, "E_SAFETY_DENIED", id="no such session"),
        pytest.param(
            ["ant", "bee"], "session_reply", {"message": "to whom"}, "E_VERB_UNSUPPORTED", id="two callers"
        ),
        pytest.param(
            ["bee"],
            "session_reply",
            {"message": "to ant", "session_id": ANT},
            "E_SAFETY_DENIED",
            id="to a caller that another has followed",
        ),
        pytest.param(
            ["ant"],
            "session_reply",
            {"message": "x" * (192 * 1024)},
            "E_MANIFEST_INVALID",
            id="a large one",
        ),
    ],
)
async def test_what_cannot_be_is_refused_on_the_node(  # noqa: PLR0913, PLR0917 - a table
    relay: FakeRelay, client: SocketClient, callers: list[str], method: str, params: Any, code: str
) -> None:
    for caller_id in callers:
        relay.open({"ant": ANT, "bee": BEE}[caller_id], caller_id)
    assert await code_of(client, method, params) == code
    assert relay.sent == []


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


async def test_a_connection_is_attached_once(relay: FakeRelay, client: SocketClient) -> None:
    relay.open()
    relay.open(BEE, "bee")
    assert "result" in await client.request("session_attach", {"session_id": ANT})
    assert "result" in await client.request("session_attach", {"session_id": ANT})
    assert (await client.request("session_attach", {"session_id": BEE}))["error"]["code"] == -32602


async def test_replies_are_refused_that_the_relay_would_not_read_in_time(
    relay: FakeRelay, client: SocketClient
) -> None:
    relay.open()
    large = {"message": "x" * 190_000}
    assert "result" in await client.request("session_reply", large)
    assert await code_of(client, "session_reply", large) == "E_RATE_LIMITED"
    for _ in range(3):  # the relay reads more because of them
        relay.give("session_message", {"session_id": ANT, "message": "go on"})
    assert "result" in await client.request("session_reply", large)


async def test_a_reply_goes_to_the_sessions_caller(relay: FakeRelay, client: SocketClient) -> None:
    relay.open()
    assert (await client.request("session_reply", {"message": "done"}))["result"] == {}
    assert relay.of("session_event") == [{"session_id": ANT, "message": "done"}]


async def test_a_reply_without_a_connection_to_the_relay_is_an_error(
    relay: FakeRelay, client: SocketClient
) -> None:
    relay.open()
    relay.is_up = False
    relay.tools.lost()
    response = await client.request("session_reply", {"message": "done"})
    assert response["error"]["message"] == "The relay is not reached; nothing was sent."


async def test_a_reply_that_the_connection_to_the_relay_does_not_take_can_be_sent_again(
    relay: FakeRelay, client: SocketClient
) -> None:
    relay.open()
    relay.is_up = False
    error = (await client.request("session_reply", {"message": "done"}))["error"]
    assert (error["data"]["code"], error["data"]["retry_after_ms"]) == ("E_RATE_LIMITED", 1000)
    relay.is_up = True
    assert (await client.request("session_reply", {"message": "done"}))["result"] == {}


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
        ("session_reply", {"message": "done", "session_id": 1}),
        ("node", {"extra": 1}),
    ],
)
async def test_params_of_another_form_are_rejected(
    relay: FakeRelay, client: SocketClient, method: str, params: Any
) -> None:
    relay.open()
    assert (await client.request(method, params))["error"]["code"] == -32602
    assert relay.sent == []
