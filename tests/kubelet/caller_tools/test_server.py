import asyncio
import os
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kubelet.caller_tools import server
from kubelet.caller_tools.server import MAX_CLIENTS_OF_ONE_USER, Client
from kubelet.caller_tools.sessions import MAX_UNREAD
from kubelet.caller_tools.socket_file import Peer
from schemas.registry import SchemaRegistry
from tests.fakes.caller_tools import ANT, FakeRelay, SocketClient, connected, served
from tests.fakes.lines import LogLines
from tests.fakes.polling import until


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


async def test_a_message_goes_to_every_client_of_its_session(relay: FakeRelay, path: Path) -> None:
    relay.open()
    async with connected(path) as first, connected(path) as second:
        await first.request("node")
        await second.request("node")
        relay.give("session_message", {"session_id": ANT, "message": "hello"})
        for client in (first, second):
            await client.notification()
            assert (await client.notification())["params"]["message"] == "hello"


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
