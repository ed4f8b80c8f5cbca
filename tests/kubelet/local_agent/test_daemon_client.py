import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kubelet.caller_tools import server as methods
from kubelet.caller_tools.server import LocalMethods
from kubelet.local_agent.daemon_client import MAX_LINE_BYTES, PROBE_AFTER_S, DaemonClient, ResponseError
from schemas.errors import Failure, ToolError
from schemas.pacing import Backoff
from schemas.process.logs import make_logger
from schemas.registry import SchemaRegistry
from tests.fakes.background import in_background
from tests.fakes.caller_tools import ANT, BEE, BOUND_S, MEMORY, SEND, served
from tests.fakes.lines import LogLines
from tests.fakes.polling import until
from tests.fakes.signer import NODE_ID

LENDING = b'{"type":"caller_tools_config","params":{"caller_id":"a","tools":[%b]}}\n'


class Follower:
    def __init__(self) -> None:
        self.node_id = ""
        self.lent: list[tuple[str, list[str]]] = []
        self.messages: list[str] = []

    def node_known(self, node_id: str) -> None:
        self.node_id = node_id

    def lend(self, caller_id: str, tools: list[Mapping[str, Any]]) -> None:
        self.lent.append((caller_id, [tool["name"] for tool in tools]))

    def withdraw(self) -> None:
        self.lent.append(("", []))

    def message(self, session_id: str, message: str) -> None:  # noqa: ARG002 - one session each
        self.messages.append(message)


@asynccontextmanager
async def followed(
    path: Path, log: LogLines, session_id: str | None = None, probe_after_s: float = PROBE_AFTER_S
) -> AsyncIterator[tuple[DaemonClient, Follower]]:
    follower = Follower()
    backoff = Backoff(0.001, 0.002)
    client = DaemonClient(path, session_id, follower, backoff, make_logger("kubelet", log), probe_after_s)
    async with in_background(client.run()):
        yield client, follower


async def test_it_learns_the_node_and_what_is_lent(
    path: Path, registry: SchemaRegistry, log: LogLines
) -> None:
    async with served(path, registry, log) as relay, followed(path, log) as (_, follower):
        relay.open()
        await until(lambda: follower.lent)
        assert follower.node_id == NODE_ID
        relay.open(ANT, "ant", SEND)
        relay.end()
        await until(lambda: len(follower.lent) == 3)
        assert follower.lent == [("ant", ["get_memory"]), ("ant", ["send_response"]), ("ant", [])]


async def test_a_request_that_is_cancelled_is_cancelled_at_the_daemon(
    path: Path, registry: SchemaRegistry, log: LogLines
) -> None:
    async with served(path, registry, log) as relay, followed(path, log) as (client, follower):
        relay.open()
        await until(lambda: follower.lent)
        asked = asyncio.create_task(client.request("caller_tool", {"tool": "get_memory"}))
        await relay.requests()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await until(lambda: relay.of("caller_tool_cancel"))


async def test_a_daemon_that_waits_for_a_caller_is_probed_and_not_lost(
    path: Path, registry: SchemaRegistry, log: LogLines, monkeypatch: pytest.MonkeyPatch
) -> None:
    probes: list[object] = []
    node = LocalMethods.node

    async def counted(self: LocalMethods, *arguments: Any) -> Any:
        probes.append(self)
        return await node(self, *arguments)

    monkeypatch.setitem(vars(methods)["_METHODS"], "node", counted)
    async with (
        served(path, registry, log) as relay,
        followed(path, log, probe_after_s=0.02) as (client, follower),
    ):
        relay.open()
        await until(lambda: follower.lent)
        asked = asyncio.create_task(client.request("caller_tool", {"tool": "get_memory"}))
        (request,) = await relay.requests()
        await until(lambda: len(probes) > 3)
        relay.answer(request, "late")
        assert await asked == "late"


async def test_a_daemon_that_answers_nothing_is_lost(path: Path, log: LogLines) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(LENDING % b"")
        await reader.read()
        writer.close()

    server = await asyncio.start_unix_server(silent, path)
    async with server, followed(path, log, probe_after_s=0.02) as (client, _):
        await log.until("daemon connected")
        with pytest.raises(ToolError) as raised:
            await client.request("caller_tool", {"tool": "get_memory"})
        assert raised.value.failure is Failure.CALLER_DISCONNECTED
        await log.until("daemon does not answer")


async def test_an_error_keeps_what_the_daemon_sent(
    path: Path, registry: SchemaRegistry, log: LogLines
) -> None:
    async with served(path, registry, log) as relay, followed(path, log) as (client, follower):
        relay.open()
        await until(lambda: follower.lent)
        asked = asyncio.create_task(client.request("caller_tool", {"tool": "get_memory"}))
        relay.fail((await relay.requests())[0], "tool_failed", "no memory")
        with pytest.raises(ResponseError) as raised:
            await asked
        assert raised.value.caller_text == "no memory"
        assert raised.value.sent["code"] == "E_INTERNAL"
        assert set(raised.value.sent) == {"code", "message", "suggested_fix"}


async def test_a_request_that_the_daemon_would_not_read_fails_at_once(
    path: Path, registry: SchemaRegistry, log: LogLines
) -> None:
    async with served(path, registry, log) as relay, followed(path, log) as (client, follower):
        relay.open()
        await until(lambda: follower.lent)
        async with asyncio.timeout(BOUND_S):
            with pytest.raises(ToolError, match="larger than 192 KiB") as raised:
                await client.request("session_reply", {"message": "\u65e5" * 50_000})
            assert raised.value.failure is Failure.ARGUMENTS_INVALID
            assert await client.request("session_reply", {"message": "shorter"}) == {}


async def test_without_a_daemon_a_request_fails_at_once(path: Path, log: LogLines) -> None:
    async with followed(path, log) as (client, _):
        await log.until("daemon not reached")
        with pytest.raises(ToolError) as raised:
            await client.request("node", {})
        assert raised.value.failure is Failure.NODE_OFFLINE


async def test_a_daemon_that_is_lost_withdraws_and_one_that_is_back_lends_again(
    path: Path, registry: SchemaRegistry, log: LogLines
) -> None:
    async with followed(path, log) as (client, follower):
        async with served(path, registry, log) as relay:
            relay.open()
            await until(lambda: follower.lent)
            asked = asyncio.create_task(client.request("caller_tool", {"tool": "get_memory"}))
            await relay.requests()
        with pytest.raises(ToolError) as raised:
            await asked
        assert raised.value.failure is Failure.CALLER_DISCONNECTED
        await until(lambda: follower.lent[-1] == ("", []))
        async with served(path, registry, log) as relay:
            relay.open()
            await until(lambda: follower.lent[-1] == ("ant", ["get_memory"]))


async def test_attached_it_neither_shows_another_session_nor_reads_a_message_of_it(
    path: Path, registry: SchemaRegistry, log: LogLines
) -> None:
    async with served(path, registry, log) as relay, followed(path, log, BEE) as (_, follower):
        relay.open(ANT, "ant", MEMORY)
        await log.until("session not live")  # until then the daemon shows it the only one
        relay.give("session_message", {"session_id": ANT, "message": "for the agent of ant"})
        relay.open(BEE, "bee", SEND)
        await until(lambda: follower.lent)
        relay.give("session_message", {"session_id": BEE, "message": "for the agent of bee"})
        await until(lambda: "for the agent of bee" in follower.messages)
        assert follower.messages == ["for the agent of bee"]
        relay.end(ANT)
        relay.end(BEE)
        await until(lambda: len(follower.lent) == 2)
        assert follower.lent == [("bee", ["send_response"]), ("bee", [])]


async def test_until_it_is_attached_it_replies_to_no_other_session(
    path: Path, registry: SchemaRegistry, log: LogLines
) -> None:
    async with served(path, registry, log) as relay, followed(path, log, BEE) as (client, follower):
        relay.open(ANT, "ant", MEMORY)
        await log.until("session not live")
        with pytest.raises(ToolError) as raised:
            await client.request("session_reply", {"message": "for bee"})
        assert raised.value.failure is Failure.SESSION_UNKNOWN
        relay.open(BEE, "bee", SEND)
        await until(lambda: follower.lent)
        await client.request("session_reply", {"message": "for bee"})
        assert relay.of("session_event") == [{"session_id": BEE, "message": "for bee"}]


async def test_attached_to_what_it_was_shown_already_it_shows_that(
    path: Path, registry: SchemaRegistry, log: LogLines
) -> None:
    async with served(path, registry, log) as relay:
        relay.open()
        async with followed(path, log, ANT) as (_, follower):
            await until(lambda: follower.lent)
            assert follower.lent == [("ant", ["get_memory"])]


async def test_messages_are_handed_over(path: Path, registry: SchemaRegistry, log: LogLines) -> None:
    async with served(path, registry, log) as relay, followed(path, log) as (_, follower):
        relay.open()
        relay.give("session_message", {"session_id": ANT, "message": "hello"})
        await until(lambda: follower.messages == ["hello"])


@pytest.mark.parametrize(
    "said",
    [
        b"no json\n",
        b"x" * (MAX_LINE_BYTES + 1) + b"\n",
        b'{"id":99,"result":1}\n',
        b"[]\n",
        b'{"id":[]}\n',
        b'{"id":1,"error":7}\n',
        b'{"id":1,"error":{"data":{"caller_message":{}}}}\n',
        b'{"id":1,"result":null}\n',
        b'{"id":1,"result":{"node_id":"x"}}\n',
        b'{"type":"session_message"}\n',
        b'{"type":"session_message","params":{"message":7}}\n',
        b'{"type":"caller_tools_config","params":{"caller_id":"a"}}\n',
        LENDING % b"7",
        LENDING % b'{"name":"x"}',
        LENDING % b'{"name":"x","inputSchema":{},"title":7}',
    ],
    ids=lambda said: said[:90].decode(),
)
async def test_a_daemon_that_breaks_the_protocol_is_survived(path: Path, log: LogLines, said: bytes) -> None:
    connections = 0

    async def misbehave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        writer.write(said)
        try:
            await reader.readline()
        finally:
            writer.close()

    async with await asyncio.start_unix_server(misbehave, path):
        async with followed(path, log):
            await until(lambda: connections >= 3)
        # Each connection has been closed; a server that ends first leaves the one that it has just accepted.
        await until(lambda: len(asyncio.all_tasks()) == 1)
