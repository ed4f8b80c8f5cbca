"""What the relay logs of calls and messages whose form is wrong, by HTTP and by stdio, against references.

The first has a line for each failed call, those by HTTP and then the same by stdio. The second has for each
message whose ``id``, ``jsonrpc``, ``method`` or ``params`` are malformed what is sent, its answer, and the
members of its line: the same by all transports. A failure is real: it is made over a socket, and through a
``relay stdio`` that runs as its users run it.
"""

import asyncio
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio

from schemas.errors import Failure, to_jsonrpc_error
from schemas.projection import META_ERROR, META_IDEMPOTENCY_KEY, META_STEP_ID, META_TASK_ID, META_TRACEPARENT
from tests.fakes.hub import Hub
from tests.fakes.mcp_wire import ERA_META, NEW, OLD, McpWire
from tests.fakes.served_relay import ServedRelay
from tests.fakes.serving import Server
from tests.fakes.signer import NODE_ID

SERVED = pytest.mark.asyncio(loop_scope="module")

BOUND_S: Final = 60
GOLDEN: Final = Path(__file__).parent.parent / "fixtures" / "mcp" / "envelope_validation_golden.jsonl"
MALFORMED: Final = [
    json.loads(line)
    for line in GOLDEN.with_name("required_members_golden.jsonl").read_text("utf-8").splitlines()
]
OF_THE_RUN: Final = {"ts", "correlation_id", "traceId", "spanId", "durationMs", "requestId"}
REQUIRED: Final = {
    *("ts", "level", "component", "event", "correlation_id"),
    *("agentId", "taskId", "stepId", "transport", "route", "method", "status", "durationMs"),
    *("attempt", "inputBytes", "outputBytes", "requestId", "traceId", "spanId", "metadata", "error"),
}
ECHO_NAME = f"sysecho.{NODE_ID}.echo.invoke"
PING = {"message": "ping"}
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
LABELS = {META_TASK_ID: "task-7", META_STEP_ID: "step-8"}
Ask = Callable[..., Any]


def message(name: object = ECHO_NAME, arguments: object = PING, **members: Any) -> dict[str, Any]:
    """Return a call of the new era; ``...`` for a name or arguments leaves them out."""
    meta = {**ERA_META, **members.pop("meta_members", {})}
    params = {"name": name, "arguments": arguments, "_meta": meta}
    return {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "tools/call",
        "params": {key: value for key, value in params.items() if value is not ...},
    } | members


CASES: Final[Mapping[str, Mapping[str, Any]]] = {
    "no name": message(...),
    "an empty name": message(""),
    "arguments in a list": message(arguments=["ping"]),
    "a text for arguments": message(arguments="ping"),
    "a member too many": message(more=1),
    "meta that is no object": message(meta="x"),
    "a key of null": message(idempotencyKey=None),
    "a key that is a number": message(meta_members={META_IDEMPOTENCY_KEY: 7}),
    "an empty key": message(idempotencyKey=""),
    "a key that is too long": message(meta_members={META_IDEMPOTENCY_KEY: "k" * 129}),
    "two keys": message(idempotencyKey="k", meta_members={META_IDEMPOTENCY_KEY: "l"}),
    "an alias, arguments in a list": message(ECHO_NAME.replace(".", "-"), ["ping"]),
    "an unknown tool, arguments in a list": message("echo", ["ping"]),
    "an argument that is missing": message(arguments={}),
    "an argument of another type": message(arguments={"message": 7}),
    "labelled and traced": message(arguments=[], meta_members={**LABELS, META_TRACEPARENT: TRACEPARENT}),
}


@pytest_asyncio.fixture(loop_scope="module")
async def relay(hub: Hub, server: Server) -> AsyncIterator[ServedRelay]:
    hub.connect(hub.ca.issue())
    async with ServedRelay.open(hub, server) as relay:
        yield relay


@asynccontextmanager
async def over_http(relay: ServedRelay) -> AsyncIterator[Ask]:
    async with McpWire.open(relay.address, NEW, relay.hub.token()) as wire:
        yield wire.ask


@asynccontextmanager
async def over_stdio(relay: ServedRelay) -> AsyncIterator[Ask]:
    """Hold the client's end of a ``relay stdio``."""
    bridge = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "relay", "stdio", "--url", f"http://{relay.address}"),
        stdin=PIPE,
        stdout=PIPE,
        stderr=DEVNULL,
        env={**os.environ, "EDGE_TOKEN": relay.hub.token()},
    )

    async def ask(*documents: Mapping[str, Any]) -> dict[str, Any]:
        return await _asked(bridge, documents)

    try:
        yield ask
        assert bridge.stdin is not None
        bridge.stdin.close()
        assert await bridge.wait() == 0
    finally:
        if bridge.returncode is None:
            bridge.kill()
            await bridge.wait()


async def _asked(bridge: Process, documents: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Send ``documents``, and return the one line that answers them."""
    assert bridge.stdin is not None
    assert bridge.stdout is not None
    bridge.stdin.writelines(json.dumps(document).encode() + b"\n" for document in documents)
    answer: dict[str, Any] = json.loads(await bridge.stdout.readline())
    return answer


TRANSPORTS = {"http": over_http, "stdio": over_stdio}
transports = pytest.mark.parametrize(
    "transport", ["http", pytest.param("stdio", marks=pytest.mark.integration)]
)


async def made(relay: ServedRelay, transport: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Make every failure by ``transport``; return what the clients were told and what was logged."""
    before = len(relay.hub.access_lines.entries())
    async with asyncio.timeout(BOUND_S), TRANSPORTS[transport](relay) as ask:
        answers = [await ask(document) for document in CASES.values()]
    return answers, relay.hub.access_lines.entries()[before:]


def comparable(line: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name not in OF_THE_RUN}


def golden(transport: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in GOLDEN.read_text("utf-8").splitlines()]
    return [line for line in lines if line["transport"] == transport]


def text_and_meta(answer: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a refusal in both of its forms, less the id that is each call's own."""
    result = answer["result"]
    assert result["isError"] is True
    (content,) = result["content"]
    forms = json.loads(content["text"]), dict(result["_meta"][META_ERROR])
    for form in forms:
        assert len(form.pop("correlation_id")) == 26
    return forms


@pytest.mark.holds("ENVELOPE/log-fields")
@SERVED
@transports
async def test_a_failure_is_logged_as_the_reference_has_it(relay: ServedRelay, transport: str) -> None:
    _, lines = await made(relay, transport)
    reference = golden(transport)
    assert [line.keys() for line in lines] == [REQUIRED] * len(CASES)
    for case, line, expected in zip(CASES, lines, reference, strict=True):
        assert (case, comparable(line)) == (case, comparable(expected))


@pytest.mark.holds("ENVELOPE/parity")
@pytest.mark.integration
@SERVED
async def test_both_transports_tell_and_log_the_same_failure(relay: ServedRelay) -> None:
    by_http, http_lines = await made(relay, "http")
    by_stdio, stdio_lines = await made(relay, "stdio")
    for case, one, other in zip(CASES, by_http, by_stdio, strict=True):
        assert (case, text_and_meta(one)) == (case, text_and_meta(other))
        assert (one["id"], one["jsonrpc"]) == (other["id"], other["jsonrpc"])
    for case, one, other in zip(CASES, http_lines, stdio_lines, strict=True):
        assert (case, one["error"]) == (case, other["error"])
        assert comparable(one) == comparable(other) | {"transport": "http"}
        assert (one["traceId"], one["requestId"]) == (other["traceId"], other["requestId"])


@pytest.mark.holds("ENVELOPE/parity")
@SERVED
@transports
async def test_what_is_logged_and_what_is_told_is_one_row_of_the_table(
    relay: ServedRelay, transport: str
) -> None:
    answers, lines = await made(relay, transport)
    for answer, line in zip(answers, lines, strict=True):
        text, meta = text_and_meta(answer)
        assert text == meta
        canonical = line["error"]["canonical"]
        assert line["status"] == to_jsonrpc_error(canonical)["data"]["httpStatus"]
        # Of arguments the log has no more than that they do not fit: the message names a member of them.
        logged = line["error"]["message"]
        of_arguments = logged == Failure.ARGUMENTS_INVALID.value.message
        assert meta["message"].startswith("Argument `message` " if of_arguments else logged.removesuffix("."))
        assert line["outputBytes"] == len(answer["result"]["content"][0]["text"])


def test_the_reference_has_every_failure_by_both_transports_and_nothing_of_arguments() -> None:
    text = GOLDEN.read_text("utf-8")
    assert [len(golden(transport)) for transport in TRANSPORTS] == [len(CASES)] * 2
    assert len(text.splitlines()) == 2 * len(CASES)
    assert all(json.loads(line).keys() == REQUIRED for line in text.splitlines())
    assert text.isascii()
    assert "ping" not in text


# --- messages whose required members are malformed ------------------------------------------------------


def logged(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line as the second reference has it."""
    own = {"ts", "correlation_id", "durationMs", "inputBytes", "transport"}
    assert line.keys() == REQUIRED
    return {name: value for name, value in line.items() if name not in own}


@pytest.mark.holds("ENVELOPE/applied", "ENVELOPE/log-fields", "ENVELOPE/parity")
@SERVED
@pytest.mark.parametrize("era", [OLD, NEW])
async def test_a_malformed_member_has_the_answer_and_the_line_of_the_reference(
    relay: ServedRelay, era: str
) -> None:
    async with McpWire.open(relay.address, era, relay.hub.token()) as wire:
        for case in MALFORMED:
            before = len(relay.hub.access_lines.entries())
            response = await wire.post(json.dumps(case["sent"]).encode())
            assert (case["case"], response.status_code) == (case["case"], 400)
            assert (case["case"], response.json()) == (case["case"], case["answer"])
            (line,) = relay.hub.access_lines.entries()[before:]
            assert (line["transport"], logged(line)) == ("http", case["line"])
    assert relay.calls() == []


@pytest.mark.holds("ENVELOPE/parity")
@pytest.mark.integration
@SERVED
async def test_a_malformed_member_has_them_by_stdio_too(relay: ServedRelay) -> None:
    async with asyncio.timeout(BOUND_S), over_stdio(relay) as ask:
        for case in MALFORMED:
            before = len(relay.hub.access_lines.entries())
            assert (case["case"], await ask(case["sent"])) == (case["case"], case["answer"])
            (line,) = relay.hub.access_lines.entries()[before:]
            assert (line["transport"], logged(line)) == ("stdio", case["line"])


@pytest.mark.integration
@SERVED
async def test_a_notification_has_no_answer_by_stdio(relay: ServedRelay) -> None:
    changed = {"jsonrpc": "2.0", "method": "notifications/roots/list_changed"}
    listed = message() | {"id": "list", "method": "tools/list", "params": {"_meta": dict(ERA_META)}}
    async with asyncio.timeout(BOUND_S), over_stdio(relay) as ask:
        assert (await ask(changed, listed))["id"] == "list"
    assert relay.hub.access_lines.entries() == []
