"""Attacker: a process on the node that may connect to the socket of local agents. Tried: floods of lines and
of connections, lines that never end, half lines, bytes that are no text, requests whose answers are not read,
ids used twice, guessed sessions, another user, a link where the socket should be.

What must happen: an error or a closed connection for the attacker, a bound on what it can make the daemon
hold, and the other local clients served as before. Nothing of it reaches the relay.
"""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
import pytest_asyncio

from kubelet.caller_tools.json_rpc import MAX_LINE_BYTES
from kubelet.caller_tools.server import MAX_IN_FLIGHT
from kubelet.caller_tools.socket_file import SocketFileError, bind_socket
from schemas.registry import SchemaRegistry
from tests.fakes.caller_tools import ANT, BEE, OTHER_OWNER, FakeRelay, connected, served
from tests.fakes.lines import LogLines
from tests.fakes.polling import until

MIB = 1 << 20
OTHER_USER = 65534


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "relay.sock"


@pytest.fixture
def log() -> LogLines:
    return LogLines()


@pytest_asyncio.fixture
async def relay(path: Path, registry: SchemaRegistry, log: LogLines) -> AsyncIterator[FakeRelay]:
    async with served(path, registry, log) as relay:
        relay.open()
        yield relay


async def is_served(relay: FakeRelay, path: Path) -> bool:
    """Return whether another client can still use the caller's tool."""
    before = len(relay.of("caller_tool"))
    async with connected(path) as client:
        id_ = client.send("caller_tool", {"tool": "get_memory", "arguments": {"from": "another"}})
        requests = await relay.requests(before + 1)
        relay.answer(requests[-1], "served")
        return bool((await client.response(id_))["result"] == "served")


async def test_a_line_that_never_ends_costs_no_memory(relay: FakeRelay, path: Path) -> None:
    process = psutil.Process()
    async with connected(path) as client:
        before = process.memory_info().rss
        for _ in range(256):
            client.writer.write(b"x" * (MIB // 16))
            await client.writer.drain()
        assert (await client.response(None))["error"]["code"] == -32600
        assert process.memory_info().rss - before < 8 * MIB
        assert await is_served(relay, path)
    assert relay.tools.counts["malformed_lines"] == 1


@pytest.mark.parametrize(
    "data",
    [
        os.urandom(1024).replace(b"\n", b"\0") + b"\n",
        b"\xff" * 100 + b"\n",
        b'{"jsonrpc":"2.0","id":1,"method":"node","params":' + b"[" * 5000 + b"\n",
        b'{"jsonrpc":"2.0","id":1e999,"method":"node"}\n',
        b'{"id":1,"id":2,"jsonrpc":"2.0","method":"node"}\n',
        b'{"jsonrpc":"2.0","id":"\\ud800","method":"node"}\n',
        b"GET / HTTP/1.1\r\n",
    ],
    ids=["random", "no text", "deep", "infinite", "doubled", "surrogate", "http"],
)
async def test_garbage_gets_an_error_and_the_connection_goes_on(
    relay: FakeRelay, path: Path, data: bytes
) -> None:
    async with connected(path) as client:
        client.writer.write(data)
        assert "error" in await client.response(None)
        client.send("node", {}, "after")
        assert "result" in await client.response("after")
    assert relay.sent == []


async def test_a_half_line_is_never_a_request(relay: FakeRelay, path: Path) -> None:
    async with connected(path) as client:
        client.writer.write(b'{"jsonrpc":"2.0","id":1,"method":"caller_tool","params":{"tool":"get_memory"}}')
        await client.writer.drain()
        assert await is_served(relay, path)
    await until(lambda: relay.tools.summary().startswith("1 sessions, 0 local clients"))
    assert len(relay.of("caller_tool")) == 1


async def test_a_flood_of_requests_is_bounded_and_the_others_are_served(relay: FakeRelay, path: Path) -> None:
    async with connected(path) as client:
        for number in range(2000):
            client.send("caller_tool", {"tool": "get_memory", "arguments": {"n": number}}, number)
        assert (await client.response(1999))["error"]["data"]["code"] == "E_RATE_LIMITED"
        # What the relay was sent is what one session may have pending; the rest waits or was refused.
        assert len(relay.of("caller_tool")) == 128
        assert relay.tools.summary().startswith("1 sessions, 1 local clients")
    await until(lambda: len(relay.of("caller_tool_cancel")) == 128)
    assert MAX_IN_FLIGHT < 2000
    assert await is_served(relay, path)


async def test_a_flood_of_connections_leaves_places_to_other_users(relay: FakeRelay, path: Path) -> None:
    sockets = [socket.socket(socket.AF_UNIX) for _ in range(60)]
    try:
        for each in sockets:
            each.settimeout(0)
            each.connect_ex(str(path))
        await until(lambda: relay.tools.counts["connections_refused"] > 0)
        assert "local clients" in relay.tools.summary()
    finally:
        for each in sockets:
            each.close()
    await until(lambda: relay.tools.summary().startswith("1 sessions, 0 local clients"))
    assert await is_served(relay, path)


async def test_large_arguments_of_many_requests_are_bounded(relay: FakeRelay, path: Path) -> None:
    text = "x" * (190 * 1024)
    async with connected(path) as client:
        for number in range(120):
            client.send("caller_tool", {"tool": "get_memory", "arguments": {"text": text}}, number)
            await client.writer.drain()
        refused = (await client.response(119))["error"]
        assert refused["data"]["code"] == "E_RATE_LIMITED"
        assert len(relay.of("caller_tool")) * len(text) <= 16 * MIB


async def test_an_attacker_that_does_not_read_is_disconnected(
    relay: FakeRelay, path: Path, log: LogLines
) -> None:
    async with connected(path) as client:
        assert "result" in await client.request("node")
        for _ in range(200):
            client.writer.write(b"[" * (MAX_LINE_BYTES // 1024) + b"\n")
        for _ in range(40):
            relay.give("session_message", {"session_id": ANT, "message": "x" * 190_000})
        await client.writer.drain()
        await log.until("local client disconnected: it does not read what it is sent")
    assert await is_served(relay, path)


async def test_a_guessed_session_cannot_be_told_from_none(relay: FakeRelay, path: Path) -> None:
    relay.open(BEE, "bee", owner=OTHER_OWNER)
    relay.end(BEE)
    async with connected(path) as client:
        ended = await client.request("session_attach", {"session_id": BEE})
        never = await client.request("session_attach", {"session_id": "gogol_20261122_020000_ffffffff"})
    assert ended["error"] == never["error"]


async def test_one_client_cannot_use_anothers_id(relay: FakeRelay, path: Path) -> None:
    async with connected(path) as victim, connected(path) as attacker:
        victim.send("caller_tool", {"tool": "get_memory", "arguments": {}}, "shared")
        [request] = await relay.requests()
        attacker.send("node", {}, "shared")
        assert "node_id" in (await attacker.response("shared"))["result"]
        relay.answer(request, "the victim's")
        assert (await victim.response("shared"))["result"] == "the victim's"


CONNECT = """
import os, socket, sys
os.setgroups([])
os.setgid({user})
os.setuid({user})
client = socket.socket(socket.AF_UNIX)
try:
    client.connect(sys.argv[1])
except PermissionError:
    sys.exit(13)
try:
    client.sendall(b'{{"jsonrpc":"2.0","id":1,"method":"node"}}\\n')
    sys.exit(len(client.recv(100)))
except ConnectionError:
    sys.exit(0)
"""


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory through which every user can reach what is in it."""
    with TemporaryDirectory() as name:
        directory = Path(name)
        directory.chmod(0o711)
        yield directory


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("opened_by_mistake", [False, True])
async def test_another_user_is_not_served(
    open_directory: Path, registry: SchemaRegistry, log: LogLines, *, opened_by_mistake: bool
) -> None:
    path = open_directory / "relay.sock"
    async with served(path, registry, log) as relay:
        relay.open()
        if opened_by_mistake:
            os.chmod(path, 0o666)  # noqa: PTH101, S103 - a Path blocks, says the linter; the attack
        command = [sys.executable, "-P", "-c", CONNECT.format(user=OTHER_USER), str(path)]
        ran = await asyncio.to_thread(subprocess.run, command, timeout=20, check=False)
        if opened_by_mistake:
            # By the kernel's word on who it is, whatever the file's mode: not a byte is answered.
            assert ran.returncode == 0
            entry = await log.until("local client refused: neither its user nor its group may connect")
            assert entry["uid"] == OTHER_USER
        else:
            assert ran.returncode == 13
        assert await is_served(relay, path)


@pytest.mark.parametrize("leads_to", ["elsewhere", "missing", "a socket"])
def test_a_link_where_the_socket_should_be_is_not_followed(tmp_path: Path, path: Path, leads_to: str) -> None:
    target = tmp_path / "target"
    with socket.socket(socket.AF_UNIX) as listener:
        if leads_to == "elsewhere":
            target.write_text("precious")
        elif leads_to == "a socket":
            listener.bind(str(target))
        path.symlink_to(target)
        with pytest.raises(SocketFileError, match="is no socket"), bind_socket(path, None):
            pass
    assert path.is_symlink()
    assert leads_to == "missing" or target.exists()
