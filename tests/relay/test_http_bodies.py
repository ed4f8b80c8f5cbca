"""What a body may say on ``/mcp``, and what becomes of it, over real HTTP and a node's real session."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from schemas.projection import META_ERROR, META_IDEMPOTENCY_KEY, META_STEP_ID, META_TASK_ID, META_TRACEPARENT
from tests.fakes.mcp_wire import ERA_META, NEW, OLD, McpWire
from tests.fakes.node_end import NodeEnd
from tests.fakes.served_relay import BOUND_S, ServedRelay
from tests.fakes.signer import NODE_ID, NOW_MS

pytestmark = pytest.mark.asyncio(loop_scope="module")

ERAS = [pytest.param(OLD, id="2025"), pytest.param(NEW, id="2026")]
ECHO_NAME = f"sysecho.{NODE_ID}.echo.invoke"
PING, PONG = {"message": "ping"}, {"message": "pong"}
RESULT = {"message": "ping", "received_at_ms": NOW_MS, "node_id": NODE_ID}
TRACE_ID, OTHER_TRACE_ID = "0af7651916cd43dd8448eb211c80319c", "4bf92f3577b34da6a3ce929d0e0e4736"
CALLERS_SPAN = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{CALLERS_SPAN}-01"
OTHER_TRACEPARENT = f"00-{OTHER_TRACE_ID}-{CALLERS_SPAN}-00"


@pytest_asyncio.fixture(loop_scope="module")
async def node(relay: ServedRelay) -> AsyncIterator[NodeEnd]:
    async with relay.session(relay.hub.ca.issue()) as end:
        yield end


def opened(relay: ServedRelay, era: str, **token: Any) -> Any:
    return McpWire.open(relay.address, era, relay.hub.token(**token))


def error_of(answer: dict[str, Any]) -> dict[str, Any]:
    assert answer["result"]["isError"] is True
    error: dict[str, Any] = answer["result"]["_meta"][META_ERROR]
    return error


# --- one reading or none --------------------------------------------------------------------------------

SINS = [
    pytest.param(b"", "not JSON", id="nothing"),
    pytest.param(b'{"jsonrpc":"2.0","id":1,"method":"tools/call"', "not JSON", id="half of a message"),
    pytest.param(
        b'{"jsonrpc":"2.0","id":1,"id":2,"method":"tools/list"}',
        "a duplicate key in an object",
        id="two ids",
    ),
    pytest.param(
        b'{"jsonrpc":"2.0","id":1,"method":"tools/list","method":"tools/call"}',
        "a duplicate key in an object",
        id="two methods",
    ),
    pytest.param(
        b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"a","name":"b"}}',
        "a duplicate key in an object",
        id="two names",
    ),
    pytest.param(b'{"jsonrpc":"2.0","id":NaN,"method":"ping"}', "a number that is not finite", id="NaN"),
    pytest.param(b'{"jsonrpc":"2.0","id":1e999,"method":"ping"}', "a number that is not finite", id="1e999"),
    pytest.param(
        b'{"jsonrpc":"2.0","id":9007199254740993,"method":"ping"}', "an integer beyond 2^53-1", id="rounded"
    ),
    pytest.param(rb'{"jsonrpc":"2.0","id":"\ud800","method":"ping"}', "a lone surrogate", id="surrogate"),
    pytest.param(b'{"jsonrpc":"2.0","id":"\xff","method":"ping"}', "not UTF-8", id="not UTF-8"),
    pytest.param(b'{"a":' * 40 + b"1" + b"}" * 40, "nested too deeply", id="too deep"),
]


@pytest.mark.holds("ENVELOPE/strict-json")
@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize(("body", "reason"), SINS)
async def test_what_is_no_strict_json_is_a_parse_error_with_400_and_no_id(
    relay: ServedRelay, era: str, body: bytes, reason: str
) -> None:
    async with opened(relay, era) as wire:
        response = await wire.post(body)
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"
    assert response.json() == {
        "jsonrpc": "2.0",
        "id": None,
        "error": {"code": -32700, "message": f"Parse error: {reason}."},
    }


@pytest.mark.parametrize(("body", "reason"), SINS)
async def test_a_session_does_not_begin_with_a_parse_error(
    relay: ServedRelay, body: bytes, reason: str
) -> None:
    headers = [
        ("Content-Type", "application/json"),
        ("Accept", "application/json, text/event-stream"),
        ("Authorization", f"Bearer {relay.hub.token()}"),
        ("Content-Length", str(len(body))),
    ]
    reply = await relay.ask("POST /mcp", headers[:3] if body else headers, body)
    assert (reply.status, reply.json()["error"]["message"]) == (400, f"Parse error: {reason}.")
    assert "mcp-session-id" not in reply.headers


async def test_without_a_token_not_even_the_parser_looks(relay: ServedRelay) -> None:
    assert (await relay.ask("POST /mcp", [("Content-Type", "application/json")], b"{")).status == 401


@pytest.mark.parametrize("era", ERAS)
async def test_a_batch_is_refused_as_the_sdk_refuses_it(relay: ServedRelay, node: NodeEnd, era: str) -> None:
    assert node.session_id
    async with opened(relay, era) as wire:
        message = wire.request(ECHO_NAME, PING)
        response = await wire.post(json.dumps([message, message]).encode(), **{"mcp-name": ECHO_NAME})
    assert response.status_code == 400
    assert response.json()["error"]["code"] in {-32600, -32602}
    assert relay.calls() == []


@pytest.mark.parametrize("era", ERAS)
async def test_a_call_without_an_id_is_never_made(relay: ServedRelay, node: NodeEnd, era: str) -> None:
    assert node.session_id
    async with opened(relay, era) as wire:
        message = wire.request(ECHO_NAME, PING)
        del message["id"]
        response = await wire.post(json.dumps(message).encode(), **{"mcp-name": ECHO_NAME})
    assert b"result" not in response.content
    assert all(decision == "deny" for decision, _, _ in relay.calls())


def without_params(method: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 1, "method": method}


@pytest.mark.holds("ENVELOPE/applied")
@pytest.mark.parametrize("method", ["tools/list", "ping"])
async def test_absent_params_are_empty_ones_in_the_old_era(relay: ServedRelay, method: str) -> None:
    async with opened(relay, OLD) as wire:
        assert "result" in await wire.ask(without_params(method))


async def test_a_call_without_params_has_no_name_in_the_old_era(relay: ServedRelay) -> None:
    async with opened(relay, OLD) as wire:
        error = error_of(await wire.ask(without_params("tools/call")))
    assert error["message"] == "The request is not a call: /tool violates pattern."


@pytest.mark.holds("ENVELOPE/applied")
@pytest.mark.parametrize("method", ["tools/list", "tools/call", "ping"])
async def test_absent_params_are_refused_in_the_new_era(relay: ServedRelay, method: str) -> None:
    async with opened(relay, NEW) as wire:
        answer = await wire.ask(without_params(method))
    assert (answer["id"], answer["error"]["data"]["canonical"]) == (1, "INVALID_INPUT")
    assert answer["error"]["message"] == "The message is malformed: /params is missing."


@pytest.mark.holds("ENVELOPE/applied")
@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize(
    ("method", "params"),
    [
        pytest.param("cancelled", {"params": {"requestId": 7}}, id="known"),
        pytest.param("roots/list_changed", {}, id="without params"),
        pytest.param("of/no/known/kind", {"params": {}}, id="unknown"),
    ],
)
async def test_a_notification_without_an_id_is_accepted(
    relay: ServedRelay, era: str, method: str, params: dict[str, Any]
) -> None:
    async with opened(relay, era) as wire:
        message = {"jsonrpc": "2.0", "method": f"notifications/{method}"} | params
        response = await wire.post(json.dumps(message).encode())
    assert (response.status_code, response.content) == (202, b"")


@pytest.mark.holds("ENVELOPE/applied")
@pytest.mark.parametrize("member", ['"result":{}', '"error":{"code":1,"message":"m"}'])
async def test_a_response_of_a_client_is_not_judged_as_a_call(relay: ServedRelay, member: str) -> None:
    async with opened(relay, OLD) as wire:
        response = await wire.post(f'{{"jsonrpc":"2.0","id":1,{member}}}'.encode())
    assert response.status_code == 202


async def test_a_token_that_ends_while_its_body_is_still_coming_ends_in_good_order(
    relay: ServedRelay, node: NodeEnd
) -> None:
    assert node.session_id
    message = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "tools/call",
        "params": {"name": ECHO_NAME, "arguments": PING, "_meta": dict(ERA_META)},
    }
    body = json.dumps(message).encode()
    head = (
        f"POST /mcp HTTP/1.1\r\nHost: {relay.address}\r\nConnection: close\r\n"
        f"Authorization: Bearer {relay.hub.token(ttl_s=60)}\r\nContent-Type: application/json\r\n"
        f"Accept: application/json, text/event-stream\r\nMCP-Protocol-Version: {NEW}\r\n"
        f"Mcp-Method: tools/call\r\nMcp-Name: {ECHO_NAME}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    reader, writer = await relay.connect()
    before = len(relay.requests)
    writer.write(head.encode() + body[:10])
    async with asyncio.timeout(BOUND_S):
        while len(relay.requests) == before:  # noqa: ASYNC110 - the server has no event for its begin
            await asyncio.sleep(0)
        relay.hub.clock.advance(60_000)
        writer.write(body[10:])
        reply = await reader.read()
    writer.close()
    assert reply.startswith(b"HTTP/1.1 200 ")
    assert b"The token is not accepted." in reply
    assert [decision for decision, _, _ in relay.calls()] == ["deny"]


# --- the same call once ---------------------------------------------------------------------------------


def keyed_at_the_top(wire: McpWire, key: object, arguments: object = PING) -> dict[str, Any]:
    return wire.request(ECHO_NAME, arguments) | {"idempotencyKey": key}


def keyed_in_meta(wire: McpWire, key: object, arguments: object = PING) -> dict[str, Any]:
    return wire.request(ECHO_NAME, arguments, **{META_IDEMPOTENCY_KEY: key})


KEYED = [pytest.param(keyed_at_the_top, id="top"), pytest.param(keyed_in_meta, id="meta")]


@pytest.mark.holds("ENVELOPE/idempotency-key")
@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize("keyed", KEYED)
@pytest.mark.parametrize("keyed_again", KEYED)
async def test_a_key_makes_a_call_once_wherever_it_stands(
    relay: ServedRelay, node: NodeEnd, era: str, keyed: Any, keyed_again: Any
) -> None:
    async with opened(relay, era) as wire:
        first = asyncio.create_task(wire.ask(keyed(wire, "k")))
        await node.acknowledge(await node.receive("cmd"), RESULT)
        assert (await first)["result"]["structuredContent"] == RESULT
        assert (await wire.ask(keyed_again(wire, "k")))["result"]["structuredContent"] == RESULT
        refused = error_of(await wire.ask(keyed_again(wire, "k", PONG)))
        other = asyncio.create_task(wire.ask(keyed(wire, "l")))
        command = await node.receive("cmd")  # the second of all
        await node.acknowledge(command, RESULT)
        assert (await other)["result"]["isError"] is False
    assert "other arguments" in refused["message"]
    assert command.payload["arguments"] == PING


async def test_both_eras_are_one_agent_to_a_key(relay: ServedRelay, node: NodeEnd) -> None:
    async with opened(relay, OLD) as old, opened(relay, NEW) as new:
        first = asyncio.create_task(old.ask(keyed_in_meta(old, "k")))
        await node.acknowledge(await node.receive("cmd"), RESULT)
        await first
        assert (await new.ask(keyed_at_the_top(new, "k")))["result"]["structuredContent"] == RESULT
    assert [line["metadata"]["toolId"] for line in relay.hub.access_lines.entries()] == [
        f"mcp.tool:{ECHO_NAME}"
    ] * 2


@pytest.mark.parametrize("era", ERAS)
async def test_a_client_that_disconnects_finds_the_outcome_when_it_calls_again(
    relay: ServedRelay, node: NodeEnd, era: str
) -> None:
    async with opened(relay, era) as wire:
        first = asyncio.create_task(wire.ask(keyed_in_meta(wire, "k")))
        command = await node.receive("cmd")
        first.cancel()
        await asyncio.wait([first])
    async with opened(relay, era) as wire:
        second = asyncio.create_task(wire.ask(keyed_in_meta(wire, "k")))
        await node.acknowledge(command, RESULT)
        assert (await second)["result"]["structuredContent"] == RESULT


@pytest.mark.holds("ENVELOPE/applied")
@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        pytest.param({"idempotencyKey": None}, "/idempotencyKey violates type", id="null"),
        pytest.param({"idempotencyKey": 7}, "/idempotencyKey violates type", id="number"),
        pytest.param({"idempotencyKey": ""}, "/idempotencyKey violates minLength", id="empty"),
        pytest.param({"idempotencyKey": "k" * 129}, "/idempotencyKey violates maxLength", id="long"),
        pytest.param({"more": 1}, "/ violates additionalProperties", id="a member more"),
        pytest.param({"meta": 1}, "/meta violates type", id="meta that is no object"),
    ],
)
async def test_what_the_sdk_would_drop_from_a_call_is_seen(
    relay: ServedRelay, node: NodeEnd, era: str, changes: dict[str, Any], rule: str
) -> None:
    assert node.session_id
    async with opened(relay, era) as wire:
        error = error_of(await wire.ask(wire.request(ECHO_NAME, PING) | changes))
    assert (error["code"], error["message"]) == ("E_MANIFEST_INVALID", f"The request is not a call: {rule}.")
    assert [decision for decision, _, _ in relay.calls()] == ["deny"]


# --- a trace --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize(
    ("meta", "header", "trace_id", "flags"),
    [
        pytest.param({META_TRACEPARENT: TRACEPARENT}, None, TRACE_ID, "01", id="in _meta"),
        pytest.param({}, TRACEPARENT, TRACE_ID, "01", id="in the header"),
        pytest.param({META_TRACEPARENT: OTHER_TRACEPARENT}, TRACEPARENT, OTHER_TRACE_ID, "00", id="in both"),
    ],
)
async def test_a_trace_goes_to_the_node_in_a_span_of_the_relays_and_into_the_log(  # noqa: PLR0913, PLR0917 - the table's columns
    relay: ServedRelay,
    node: NodeEnd,
    era: str,
    meta: dict[str, str],
    header: str | None,
    trace_id: str,
    flags: str,
) -> None:
    headers = {"traceparent": header} if header else {}
    async with opened(relay, era) as wire:
        asked = asyncio.create_task(wire.ask(wire.request(ECHO_NAME, PING, **meta), **headers))
        command = await node.receive("cmd")
        await node.acknowledge(command, RESULT)
        await asked
    (line,) = relay.hub.access_lines.entries()
    assert command.payload["traceparent"] == f"00-{trace_id}-{line['spanId']}-{flags}"
    assert line["traceId"] == trace_id
    assert line["spanId"] != CALLERS_SPAN
    assert len(bytes.fromhex(line["spanId"])) == 8


@pytest.mark.parametrize("era", ERAS)
async def test_what_is_no_trace_stays_behind(relay: ServedRelay, node: NodeEnd, era: str) -> None:
    async with opened(relay, era) as wire:
        asked = asyncio.create_task(wire.ask(wire.request(ECHO_NAME, PING), traceparent="00-0-0-00"))
        command = await node.receive("cmd")
        await node.acknowledge(command, RESULT)
        assert (await asked)["result"]["isError"] is False
    (line,) = relay.hub.access_lines.entries()
    assert "traceparent" not in command.payload
    assert (line["traceId"], line["spanId"]) == (None, None)


# --- what is logged of it -------------------------------------------------------------------------------


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize(
    ("header", "transport"),
    [({}, "http"), ({"edge-transport": "stdio"}, "stdio"), ({"edge-transport": "x"}, "http")],
)
async def test_a_call_is_logged_with_its_transport_its_size_and_its_callers_names_for_it(
    relay: ServedRelay, node: NodeEnd, era: str, header: dict[str, str], transport: str
) -> None:
    assert node.session_id
    async with opened(relay, era) as wire:
        message = wire.request(ECHO_NAME, {}, **{META_TASK_ID: "task-7", META_STEP_ID: "step-8"})
        answer = await wire.ask(message, **header)
    (line,) = relay.hub.access_lines.entries()
    assert (line["transport"], line["taskId"], line["stepId"]) == (transport, "task-7", "step-8")
    assert line["inputBytes"] == len(json.dumps(message))
    assert line["outputBytes"] == len(answer["result"]["content"][0]["text"])
    assert (line["status"], line["error"]["canonical"], line["requestId"]) == (400, "INVALID_INPUT", 1)
