"""Calls of the new era, beside the SDK's own answers to the same requests."""

import asyncio
import itertools
import json
import math
import re
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp.server.streamable_http import StreamableHTTPServerTransport
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.inbound import encode_header_value
from mcp_types import CLIENT_CAPABILITIES_META_KEY, CLIENT_INFO_META_KEY, PROTOCOL_VERSION_META_KEY
from starlette.applications import Starlette
from starlette.types import Message, Receive, Scope, Send

from relay.auth.agent_tokens import CALLER_IN_SCOPE, Caller
from relay.calls.relay_tools import Emit
from relay.http.body_parser import MESSAGE_IN_SCOPE
from relay.http.http_protocol import HttpAnswer, PendingAnswer, WholeRequest
from relay.http.request_guard import AllowedHosts, RequestGuard
from relay.limits.rate_limits import Allowance
from relay.mcp_api.endpoint import BYTES_LIKE_A_CALL, SESSION_IDLE_S, Method, until_over
from relay.mcp_api.sdk import OVER_IN_SCOPE
from relay.routing.port import LocalRouter
from schemas.addresses import HostPort
from schemas.projection import META_IDEMPOTENCY_KEY, META_TRACEPARENT
from schemas.registry import SchemaRegistry
from tests.fakes.environment import PUBLIC_URL
from tests.fakes.examples import examples
from tests.fakes.hub import Hub
from tests.fakes.raw_http import HeldConnections
from tests.fakes.routers import HeldRouter, ScriptedRouter, SilentRouter, echoed
from tests.fakes.serving import refuse
from tests.fakes.signer import NODE_ID

BOUND_S: Final = 30
ERA: Final = "2026-07-28"
ECHO_NAME: Final = f"sysecho.{NODE_ID}.echo.invoke"
META: Final[Mapping[str, Any]] = {PROTOCOL_VERSION_META_KEY: ERA, CLIENT_CAPABILITIES_META_KEY: {}}
PLAIN_HEADERS: Final[Mapping[str, str]] = {
    "content-type": "application/json",
    "accept": "application/json, text/event-stream",
    "mcp-protocol-version": ERA,
    "mcp-method": "tools/call",
    "mcp-name": ECHO_NAME,
}
ULID: Final = re.compile(rb"[0-9A-HJKMNP-TV-Z]{26}")


@dataclass
class Reply:
    """What a client is told, and whether the SDK saw its request."""

    by_sdk: bool = False
    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""

    def comparable(self) -> tuple[int, dict[bytes, bytes], bytes]:
        """Return the answer, less the ids that are each call's own."""
        return self.status, self.headers, ULID.sub(b"(a ULID)", self.body)


def comparable(answer: HttpAnswer) -> tuple[int, dict[bytes, bytes], bytes]:
    """Return an answer as ``Reply.comparable`` has it, with the headers that the protocol writes."""
    headers = {b"content-type": b"application/json", b"content-length": b"%d" % len(answer.body)}
    return Reply(status=answer.status, headers=headers, body=answer.body).comparable()


class Stage:
    """A relay's side of MCP behind its guard, without a server."""

    def __init__(self, hub: Hub, router: LocalRouter) -> None:
        self.hub = hub
        self.token = hub.token()
        # A clock that leaps: no limit is in the way of as many calls as a test makes.
        leaping = itertools.count(step=10).__next__
        self._mcp = hub.mcp(hub.gateway(router, lambda: float(leaping()), Allowance(1e6, 1e6, 100)))
        self._guard = RequestGuard(
            allowed=AllowedHosts.of(PUBLIC_URL, HostPort("127.0.0.1", 8700)),
            authenticator=hub.authenticator,
            metadata_of=None,
            metrics=hub.metrics,
            refusals=hub.refusals,
            mcp=self._mcp,
            mcp_direct=self._mcp.begin,
            node_sessions=refuse,
            other=Starlette(),
        )
        self._reply = Reply()
        self.seen_by_sdk: list[Scope] = []

    @property
    def methods(self) -> Mapping[str, Method]:
        return self._mcp.methods.table

    @classmethod
    @asynccontextmanager
    async def running(cls, hub: Hub, router: LocalRouter) -> AsyncIterator["Stage"]:
        hub.connect(hub.ca.issue())
        stage = cls(hub, router)
        by_sdk = StreamableHTTPSessionManager.handle_request

        async def seen(
            manager: StreamableHTTPSessionManager, scope: Scope, receive: Receive, send: Send
        ) -> None:
            stage._reply.by_sdk = True
            stage.seen_by_sdk.append(scope)
            await by_sdk(manager, scope, receive, send)

        with patch.object(StreamableHTTPSessionManager, "handle_request", seen):
            async with asyncio.timeout(BOUND_S), stage._mcp.running():
                yield stage

    def _lines(self, headers: Mapping[str, str], twice: str | None = None) -> list[tuple[bytes, bytes]]:
        lines = [(b"host", b"127.0.0.1:8700"), (b"authorization", f"Bearer {self.token}".encode())]
        lines += [(name.encode("ascii"), value.encode("latin-1")) for name, value in headers.items()]
        if twice is not None:
            lines.append((twice.encode("ascii"), headers.get(twice, "").encode("latin-1")))
        return lines

    async def ask(
        self,
        message: object,
        headers: Mapping[str, str] = PLAIN_HEADERS,
        gone: asyncio.Event | None = None,
        method: str = "POST",
    ) -> Reply:
        """Send one request by ASGI."""
        lines = self._lines(headers)
        scope = {"type": "http", "method": method, "path": "/mcp", "query_string": b"", "headers": lines}
        incoming = [{"type": "http.request", "body": json.dumps(message).encode(), "more_body": False}]
        reply = self._reply = Reply()

        async def receive() -> Message:
            if incoming:
                return incoming.pop()
            await (gone or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(part: Message) -> None:
            reply.status = part.get("status", reply.status)
            reply.headers |= dict(part.get("headers", ()))
            reply.body += part.get("body", b"")

        await self._guard({**scope, "client": ("127.0.0.1", 5)}, receive, send)
        return reply

    async def opened(self) -> dict[str, str]:
        """Open a session of the old era, by ASGI; return the headers of a request in it."""
        client = {"protocolVersion": OLD, "capabilities": {}, "clientInfo": {"name": "c", "version": "1"}}
        headers = {**OLD_HEADERS, "mcp-protocol-version": OLD}
        begun = await self.ask(request("initialize", **client), OLD_HEADERS)
        headers["mcp-session-id"] = begun.headers[b"mcp-session-id"].decode("ascii")
        await self.ask({"jsonrpc": "2.0", "method": "notifications/initialized"}, headers)
        return headers

    def transport(self, headers: Mapping[str, str]) -> StreamableHTTPServerTransport:
        return self._mcp._manager._server_instances[headers["mcp-session-id"]]  # noqa: SLF001 - as its caller

    async def ask_whole(
        self, message: object, headers: Mapping[str, str] = PLAIN_HEADERS, *, twice: str | None = None
    ) -> HttpAnswer | None:
        """Return the answer to a request, with one header ``twice``; None if ASGI has to serve it."""
        pending = self.begun(message, headers, twice)
        return None if pending is None else await pending.work

    def begun(
        self, message: object, headers: Mapping[str, str], twice: str | None = None
    ) -> PendingAnswer | None:
        """Return what answers a request, as ``ask_whole`` does."""
        lines = self._lines(headers, twice)
        connection = HeldConnections().hold(self.hub.authenticator.identify(self.token).name)
        body = json.dumps(message).encode()
        return self._guard.begin(WholeRequest(lines, "127.0.0.1", connection, b"/mcp", b"", body))


def call(name: object = ECHO_NAME, arguments: object = None, **members: Any) -> dict[str, Any]:
    """Return a call; ``meta`` is added to what a client of the new era has to say."""
    meta = {**META, **members.pop("meta", {})}
    params = {"name": name, "arguments": {"message": "ping"} if arguments is None else arguments}
    return {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {**params, "_meta": meta}} | members


def without(mapping: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key != name}


def asked(method: str, **params: Any) -> tuple[dict[str, Any], Mapping[str, str]]:
    """Return a request for another method, and its headers."""
    message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {**params, "_meta": META}}
    headers = {**without(PLAIN_HEADERS, "mcp-name"), "mcp-method": method}
    return message, headers | ({"mcp-name": params["uri"]} if "uri" in params else {})


LISTED: Final = {
    "a list of tools": asked("tools/list"),
    "a list of resources": asked("resources/list"),
    "a list of templates": asked("resources/templates/list"),
    "a list of prompts": asked("prompts/list"),
    "a resource": asked("resources/read", uri="fleet://nodes"),
    "the server": asked("server/discover"),
}
FAILING: Final = {
    "an unknown cursor": asked("tools/list", cursor="x"),
    "a resource that is not there": asked("resources/read", uri="fleet://other"),
}
NO_NAME = call()
del NO_NAME["params"]["name"]
PLAIN: Final[Mapping[str, tuple[object, Mapping[str, str]]]] = {
    "a call": (call(), PLAIN_HEADERS),
    "a text for an id": (call(id="seven"), PLAIN_HEADERS),
    "an empty id": (call(id=""), PLAIN_HEADERS),
    "a negative id": (call(id=-1), PLAIN_HEADERS),
    "an id that a terminal would obey": (call(id="\x7f\x1b[31m\u202e"), PLAIN_HEADERS),
    "no name": (NO_NAME, PLAIN_HEADERS),
    "arguments that do not fit": (call(arguments={"message": 7}), PLAIN_HEADERS),
    "arguments in a list": (call(arguments=["ping"]), PLAIN_HEADERS),
    "an unknown tool": (call("echo"), {**PLAIN_HEADERS, "mcp-name": "echo"}),
    "an alias": (
        call(ECHO_NAME.replace(".", "-")),
        {**PLAIN_HEADERS, "mcp-name": ECHO_NAME.replace(".", "-")},
    ),
    "a name in the header that is encoded": (
        call("\u00e9"),
        {**PLAIN_HEADERS, "mcp-name": encode_header_value("\u00e9")},
    ),
    "a key": (call(meta={META_IDEMPOTENCY_KEY: "k-1"}), PLAIN_HEADERS),
    "a key beside the call": (call(idempotencyKey="k-2"), PLAIN_HEADERS),
    "a member too many": (call(more=1), PLAIN_HEADERS),
    "a trace": (call(meta={META_TRACEPARENT: f"00-{'a' * 32}-{'b' * 16}-01"}), PLAIN_HEADERS),
    "a progress token": (call(meta={"progressToken": 7}), PLAIN_HEADERS),
    "a progress token that is none": (call(meta={"progressToken": {}}), PLAIN_HEADERS),
    "capabilities that are none": (call(meta={CLIENT_CAPABILITIES_META_KEY: ["x"]}), PLAIN_HEADERS),
    "a client that says who it is": (
        call(meta={CLIENT_INFO_META_KEY: {"name": "c", "version": "1"}}),
        PLAIN_HEADERS,
    ),
    "a client without a form": (call(meta={CLIENT_INFO_META_KEY: 7}), PLAIN_HEADERS),
    "a character set": (call(), {**PLAIN_HEADERS, "content-type": "Application/JSON; charset=utf-8"}),
    "whatever there is": (call(), {**PLAIN_HEADERS, "accept": "*/*"}),
    **LISTED,
}
ODD: Final[Mapping[str, tuple[object, Mapping[str, str]]]] = {
    "an unknown method": asked("tools/fetch"),
    "a method of the old era": asked("ping"),
    "a cursor that is no text": asked("tools/list", cursor=7),
    "a resource without a name": asked("resources/read"),
    "another resource in the header": (
        asked("resources/read", uri="fleet://nodes")[0],
        {**PLAIN_HEADERS, "mcp-method": "resources/read", "mcp-name": "fleet://other"},
    ),
    "no id": (without(call(), "id"), PLAIN_HEADERS),
    "an id of null": (call(id=None), PLAIN_HEADERS),
    "a truth for an id": (call(id=True), PLAIN_HEADERS),
    "a fraction for an id": (call(id=1.5), PLAIN_HEADERS),
    "a list for an id": (call(id=[1]), PLAIN_HEADERS),
    "no parameters": (without(call(), "params"), PLAIN_HEADERS),
    "parameters in a list": (call(params=["x"]), PLAIN_HEADERS),
    "no capabilities": (
        call(params={"name": ECHO_NAME, "_meta": without(META, CLIENT_CAPABILITIES_META_KEY)}),
        PLAIN_HEADERS,
    ),
    "another era in the body": (call(meta={PROTOCOL_VERSION_META_KEY: "2025-11-25"}), PLAIN_HEADERS),
    "an era to come": (
        call(meta={PROTOCOL_VERSION_META_KEY: "2099-01-01"}),
        {**PLAIN_HEADERS, "mcp-protocol-version": "2099-01-01"},
    ),
    "another method in the header": (call(), {**PLAIN_HEADERS, "mcp-method": "tools/list"}),
    "no method in the header": (call(), without(PLAIN_HEADERS, "mcp-method")),
    "another name in the header": (call(), {**PLAIN_HEADERS, "mcp-name": "sysecho.x.echo.invoke"}),
    "no name in the header": (call(), without(PLAIN_HEADERS, "mcp-name")),
    "whole answers alone": (call(), {**PLAIN_HEADERS, "accept": "application/json"}),
    "streams alone": (call(), {**PLAIN_HEADERS, "accept": "text/event-stream"}),
    "no answer": (call(), without(PLAIN_HEADERS, "accept")),
    "more than a client accepts": (call(), {**PLAIN_HEADERS, "accept": "*/*," + "x/y," * 100}),
    "another form": (call(), {**PLAIN_HEADERS, "content-type": "text/plain"}),
    "no form": (call(), without(PLAIN_HEADERS, "content-type")),
}


@pytest.mark.parametrize(("message", "headers"), PLAIN.values(), ids=PLAIN.keys())
async def test_a_plain_call_is_answered_as_the_sdk_answers_it(
    hub: Hub, message: object, headers: Mapping[str, str]
) -> None:
    async with Stage.running(hub, ScriptedRouter()) as stage:
        ours = await stage.ask_whole(message, headers)
        sdks = await stage.ask(message, headers)
    assert ours is not None
    assert ours.status == 200
    assert json.loads(ours.body)["result"]["resultType"] == "complete"
    assert comparable(ours) == sdks.comparable()


@pytest.mark.parametrize(("message", "headers"), FAILING.values(), ids=FAILING.keys())
async def test_a_method_fails_as_the_sdk_lets_it_fail(
    hub: Hub, message: object, headers: Mapping[str, str]
) -> None:
    async with Stage.running(hub, ScriptedRouter()) as stage:
        ours = await stage.ask_whole(message, headers)
        sdks = await stage.ask(message, headers)
    assert ours is not None
    assert json.loads(ours.body)["error"]["code"] == -32602
    assert comparable(ours) == sdks.comparable()


async def test_a_notification_goes_before_the_result_on_the_way_that_can_stream(hub: Hub) -> None:
    async def tells(_caller: Caller, _message: Mapping[str, Any], emit: Emit | None) -> dict[str, Any]:
        if emit is not None:
            await emit("notifications/message", {"level": "info", "data": "before"})
        return {"tools": []}

    async with Stage.running(hub, ScriptedRouter()) as stage:
        with patch.dict(stage.methods, {"tools/list": tells}):
            whole = await stage.ask_whole(*LISTED["a list of tools"])
            streamed = await stage.ask(*LISTED["a list of tools"])
    assert whole is not None
    events = [json.loads(line[6:]) for line in streamed.body.splitlines() if line.startswith(b"data: ")]
    assert events[0]["method"] == "notifications/message"
    assert events[0]["params"] == {"level": "info", "data": "before"}
    assert events[1] == json.loads(whole.body)


@pytest.mark.parametrize(("message", "headers"), ODD.values(), ids=ODD.keys())
async def test_what_is_not_plainly_a_call_is_left_to_the_sdk(
    hub: Hub, message: object, headers: Mapping[str, str]
) -> None:
    async with Stage.running(hub, ScriptedRouter()) as stage:
        assert await stage.ask_whole(message, headers) is None


async def test_a_whole_request_of_the_old_era_or_with_a_large_body_is_left_to_asgi(hub: Hub) -> None:
    router = ScriptedRouter()
    large = call(arguments={"message": "x" * BYTES_LIKE_A_CALL})
    async with Stage.running(hub, router) as stage:
        assert await stage.ask_whole(call(), without(PLAIN_HEADERS, "mcp-protocol-version")) is None
        assert await stage.ask_whole(large) is None
    assert router.commands == []


@pytest.mark.parametrize("name", [ECHO_NAME, None, "\n"], ids=repr)
@pytest.mark.parametrize("twice", PLAIN_HEADERS)
async def test_a_header_that_stands_twice_is_left_to_the_sdk(hub: Hub, twice: str, name: str | None) -> None:
    async with Stage.running(hub, ScriptedRouter()) as stage:
        assert await stage.ask_whole(call(name), twice=twice) is None


async def test_the_sdk_finds_the_caller_the_message_and_a_sessions_owner_without_a_token(hub: Hub) -> None:
    async with Stage.running(hub, ScriptedRouter()) as stage:
        await stage.ask(call())
        (scope,) = stage.seen_by_sdk
    of_the_server = {"type", "method", "path", "query_string", "client", "headers"}
    assert scope.keys() - of_the_server == {CALLER_IN_SCOPE, MESSAGE_IN_SCOPE, OVER_IN_SCOPE, "user"}
    assert scope["user"].access_token.token == ""
    assert b"authorization" not in dict(scope["headers"])


ODD_VALUES: Final = (
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from(["", "x", "\x7f", ERA, [], {}])
)


def some(
    names: Iterable[str], values: st.SearchStrategy[Any] = ODD_VALUES
) -> st.SearchStrategy[dict[str, Any]]:
    """Return what has up to two of the names, with a value each."""
    return st.dictionaries(st.sampled_from(sorted(names)), values, max_size=2)


@given(
    members=some(["jsonrpc", "id", "method", "params", "more"]),
    params=some(["name", "arguments", "_meta", "more"]),
    meta=some([*META, CLIENT_INFO_META_KEY, "progressToken", META_IDEMPOTENCY_KEY]),
    headers=some(PLAIN_HEADERS, st.sampled_from(["", "x", "*/*", "application/json", ERA, "tools/list"])),
)
@examples(15, 150)
def test_whatever_is_plain_the_sdk_answers_alike(
    registry: SchemaRegistry,
    members: dict[str, Any],
    params: dict[str, Any],
    meta: dict[str, Any],
    headers: dict[str, str],
) -> None:
    message = call(meta=meta)
    message["params"] |= params
    message |= members
    said = {**PLAIN_HEADERS, **headers}

    async def both() -> tuple[HttpAnswer | None, Reply]:
        with TemporaryDirectory() as directory:
            hub = Hub(Path(directory), registry)
            async with Stage.running(hub, ScriptedRouter()) as stage:
                replies = await stage.ask_whole(message, said), await stage.ask(message, said)
            hub.close()
            return replies

    ours, sdks = asyncio.run(both())
    # What has a malformed member reaches neither of the two.
    required = {name: message[name] for name in ("id", "jsonrpc", "method", "params")}
    assert sdks.by_sdk is registry.load_envelope().is_valid(required)
    assert sdks.by_sdk or ours is None
    if ours is not None:
        assert comparable(ours) == sdks.comparable()


# --- who goes away ------------------------------------------------------------------------------------


async def test_a_call_ends_when_its_caller_goes_away(hub: Hub) -> None:
    router, gone = SilentRouter(), asyncio.Event()
    async with Stage.running(hub, router) as stage:
        asking = asyncio.create_task(stage.ask(call(), gone=gone))
        await router.asked.wait()
        gone.set()
        reply = await asking
    assert router.given_up.is_set()
    assert (reply.by_sdk, reply.body) == (True, b"")
    assert [line["code"] for line in hub.audited()] == ["ok", "cancelled"]


# --- sessions of the old era --------------------------------------------------------------------------

OLD: Final = "2025-11-25"
OLD_HEADERS: Final[Mapping[str, str]] = {
    "content-type": "application/json",
    "accept": "application/json, text/event-stream",
}


def request(method: str, request_id: object = 1, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": request_id, "method": method, "params": params}


def echo(request_id: object = 1, **params: Any) -> dict[str, Any]:
    return request(
        "tools/call", request_id, **({"name": ECHO_NAME, "arguments": {"message": "ping"}} | params)
    )


OLD_PLAIN: Final[Mapping[str, dict[str, Any]]] = {
    "a call": echo(),
    "a text for an id": echo("seven"),
    "no name": request("tools/call", arguments={}),
    "arguments that do not fit": echo(arguments={"message": 7}),
    "arguments in a list": echo(arguments=["ping"]),
    "an unknown tool": echo(name="echo"),
    "an alias": echo(name=ECHO_NAME.replace(".", "-")),
    "a key": echo(_meta={META_IDEMPOTENCY_KEY: "k-1"}),
    "a member too many": echo() | {"more": 1},
    "a ping": request("ping"),
    "a ping without parameters": without(request("ping"), "params"),
    "a list of tools": request("tools/list"),
    "an unknown cursor": request("tools/list", cursor="x"),
    "a list of resources": request("resources/list"),
    "a list of templates": request("resources/templates/list"),
    "a list of prompts": request("prompts/list"),
    "a resource": request("resources/read", uri="fleet://nodes"),
    "a resource that is not there": request("resources/read", uri="fleet://other"),
}
OLD_ODD: Final[Mapping[str, tuple[object, Mapping[str, str]]]] = {
    "a progress token": (echo(_meta={"progressToken": 7}), {}),
    "a tool that waits": (request("tools/call", name="session_events", arguments={}), {}),
    "a method of the new era": (request("server/discover"), {}),
    "another method": (request("resources/subscribe", uri="fleet://nodes"), {}),
    "another beginning": (request("initialize"), {}),
    "a cursor that is no text": (request("tools/list", cursor=7), {}),
    "parameters in a list": (echo() | {"params": ["x"]}, {}),
    "parameters of null": (request("tools/list") | {"params": None}, {}),
    "a truth for an id": (echo(request_id=True), {}),
    "an id of null": (echo(None), {}),
    "another notification": (without(request("notifications/initialized"), "id"), {}),
    "an end of no call": (without(request("notifications/cancelled", requestId=9), "id"), {}),
    "an answer": ({"jsonrpc": "2.0", "id": 1, "result": {}}, {}),
    "no session": (echo(), {"mcp-session-id": "nowhere"}),
    "an era that there is not": (echo(), {"mcp-protocol-version": "2020-01-01"}),
    "whole answers alone": (echo(), {"accept": "application/json"}),
    "another form": (echo(), {"content-type": "text/plain"}),
}


@pytest.mark.parametrize("message", OLD_PLAIN.values(), ids=OLD_PLAIN.keys())
async def test_what_is_plain_in_a_session_is_answered_as_the_sdk_answers_it(
    hub: Hub, message: dict[str, Any]
) -> None:
    async with Stage.running(hub, ScriptedRouter()) as stage:
        headers = await stage.opened()
        ours, sdks = await stage.ask_whole(message, headers), await stage.ask(message, headers)
    assert ours is not None
    assert (ours.status, sdks.status) == (200, 200)
    (event,) = [line[6:] for line in sdks.body.splitlines() if line.startswith(b"data: ")]
    assert json.loads(ULID.sub(b"(a ULID)", ours.body)) == json.loads(ULID.sub(b"(a ULID)", event))


@pytest.mark.parametrize(("message", "headers"), OLD_ODD.values(), ids=OLD_ODD.keys())
async def test_what_is_not_plain_in_a_session_is_left_to_the_sdk(
    hub: Hub, message: object, headers: Mapping[str, str]
) -> None:
    async with Stage.running(hub, ScriptedRouter()) as stage:
        assert await stage.ask_whole(message, {**await stage.opened(), **headers}) is None


async def test_a_session_is_its_owners_alone_until_it_ends(hub: Hub) -> None:
    async with Stage.running(hub, ScriptedRouter()) as stage:
        headers = await stage.opened()
        stage.token, own = hub.token(sub="agent-2"), stage.token
        assert await stage.ask_whole(echo(), headers) is None
        stage.token = own
        assert await stage.ask_whole(echo(), headers) is not None
        await stage.ask(None, headers, method="DELETE")
        assert await stage.ask_whole(echo(), headers) is None


@pytest.mark.parametrize("end", ["notification", "the end of the session"])
async def test_a_call_in_a_session_ends_when_its_client_says_so(hub: Hub, end: str) -> None:
    router = SilentRouter()
    async with Stage.running(hub, router) as stage:
        headers = await stage.opened()
        calling = asyncio.create_task(stage.ask_whole(echo(7), headers))
        await router.asked.wait()
        assert await stage.ask_whole(echo(7), headers) is None  # the SDK decides on a second one of that id
        if end == "notification":
            note = without(request("notifications/cancelled", requestId=7), "id")
            assert await stage.ask_whole(note, headers) == HttpAnswer(202, b"")
        else:
            await stage.ask(None, headers, method="DELETE")
        answer = await calling
        assert answer is not None
        assert json.loads(answer.body)["error"]["message"] == "Request cancelled"
    assert router.given_up.is_set()
    assert [line["code"] for line in hub.audited()] == ["ok", "cancelled"]


async def test_of_what_is_answered_directly_a_call_in_a_session_goes_on_without_its_client(hub: Hub) -> None:
    async with Stage.running(hub, ScriptedRouter()) as stage:
        headers = await stage.opened()
        goes_on = []
        for message, fields in ((echo(), headers), (request("ping"), headers), (call(), PLAIN_HEADERS)):
            pending = stage.begun(message, fields)
            assert pending is not None
            goes_on.append(pending.goes_on)
            assert (await pending.work).status == 200
    assert goes_on == [True, False, False]


async def test_a_session_does_not_end_for_want_of_a_request_while_a_call_in_it_is_made(hub: Hub) -> None:
    router = HeldRouter()
    async with Stage.running(hub, router) as stage:
        headers = await stage.opened()
        # The SDK has no public way to ask when it ends.
        idle: Any = stage.transport(headers).idle_scope
        began, left_s = asyncio.get_running_loop().time(), idle.deadline - asyncio.get_running_loop().time()
        assert SESSION_IDLE_S - BOUND_S < left_s <= SESSION_IDLE_S
        calling = asyncio.create_task(stage.ask_whole(echo(), headers))
        command, answer = await router.next()
        assert idle.deadline >= began + SESSION_IDLE_S
        answer.set_result(echoed(command))
        assert await calling is not None
        assert began + SESSION_IDLE_S <= idle.deadline < math.inf
        kept = idle.deadline
        assert await stage.ask_whole(request("ping"), headers) is not None
        assert idle.deadline == kept
        idle.deadline = asyncio.get_running_loop().time() + 1
        assert await stage.ask_whole(request("ping"), headers) is not None
        assert idle.deadline >= kept


async def test_an_error_of_the_work_is_the_callers() -> None:
    async def fails() -> str:
        raise LookupError

    with pytest.raises(LookupError):
        await until_over(asyncio.Event(), fails())


@pytest.mark.parametrize("end", ["disconnect", "cancel"])
async def test_work_ends_with_its_request_or_with_what_waits_for_it(end: str) -> None:
    begun, ended, over = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def waits() -> str:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.set()
        return "never"

    task = asyncio.create_task(until_over(over, waits()))
    await asyncio.wait_for(begun.wait(), BOUND_S)
    if end == "disconnect":
        over.set()
        assert await asyncio.wait_for(task, BOUND_S) is None
    else:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, BOUND_S)
    assert ended.is_set()
