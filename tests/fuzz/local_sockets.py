"""Targets: the sockets of one machine: that of local agents, from both ends, and that of a status."""

import asyncio
import io
import json
import os
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

from kubelet.caller_tools.requests import CallerRequests
from kubelet.caller_tools.server import Client, ClientParts, LocalMethods
from kubelet.caller_tools.sessions import CallerNames, Sessions
from kubelet.cli import status as kubelet_status
from kubelet.local_agent.agent_tools import AgentTools, OwnTools
from kubelet.local_agent.daemon_client import DaemonClient
from kubelet.local_agent.toolbox import Toolbox
from relay.cli import show_status as relay_status
from schemas.frames import OneWayType
from schemas.kinds import KindRegistry
from schemas.pacing import Backoff
from schemas.process.logs import make_logger
from schemas.process.status_socket import NAME, StalledError, read_status
from schemas.process.status_view import AnotherVersionError, show
from schemas.registry import SchemaRegistry
from schemas.ulids import UlidSource
from tests.fakes.caller_tools import ANT, MEMORY, OWNER
from tests.fakes.lines import LogLines
from tests.fakes.signer import NODE_ID, NOW_MS
from tests.fuzz import socket_samples as samples
from tests.fuzz.live import BETWEEN_INPUTS_S, check_log, kept
from tests.fuzz.memory_loop import HERE
from tests.fuzz.scratch import directory
from tests.fuzz.target import REFUSED, Target, tried

_PLACE: Final = (HERE, 1)
_SETTLED_S: Final = 0.5
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _connected() -> tuple[Streams, Streams]:
    return await asyncio.open_connection(*_PLACE), await kept().loop.accept(_PLACE)


class LocalAgents:
    """A daemon's end of its socket, with one session of a caller; its relay answers each request at once."""

    def __init__(self) -> None:
        self._log = LogLines()
        log = make_logger("kubelet", self._log)
        names = CallerNames(directory() / "names.json", log)
        sessions = Sessions(names, log)
        opened = {"session_id": ANT, "caller_id": "ant", "owner": OWNER, "tools": [dict(MEMORY)]}
        sessions.open(opened)  # type: ignore[arg-type]  # a payload as it was read
        self._requests = CallerRequests(self._take, os.urandom)
        methods = LocalMethods(NODE_ID, sessions, self._requests, self._take)
        self._parts = ClientParts(sessions, methods, log, Counter())

    def _take(self, type_: OneWayType, payload: Mapping[str, Any]) -> bool:
        if type_ is OneWayType.CALLER_TOOL:
            ids = {name: payload[name] for name in ("session_id", "request_id")}
            answer: Any = {**ids, "result": payload["arguments"]}
            asyncio.get_running_loop().call_soon(self._requests.answer, answer)
        return True

    async def play(self, data: bytes) -> None:
        """Send ``data``, and read what the daemon answers to it."""
        (reader, writer), (far_reader, far_writer) = await _connected()
        serving = asyncio.create_task(Client(far_reader, far_writer, self._parts).run())
        asked = {"jsonrpc": "2.0", "id": "the last one", "method": "node"}
        writer.write(data + b"\n" + json.dumps(asked).encode() + b"\n")
        lines = await _lines(reader)
        writer.close()
        await serving
        far_writer.close()
        await asyncio.sleep(BETWEEN_INPUTS_S)
        check_log(self._log)
        assert self._requests.in_flight == 0
        answers = [line for line in lines if "jsonrpc" in line]
        assert len(answers) <= data.count(b"\n") + 2
        assert {"jsonrpc": "2.0", "id": "the last one", "result": {"node_id": NODE_ID}} in answers


async def _lines(reader: asyncio.StreamReader) -> list[dict[str, Any]]:
    """Return all that arrives until nothing more does."""
    text = b""
    try:
        async with asyncio.timeout(_SETTLED_S):
            while piece := await reader.read(1 << 16):
                text += piece
    except (TimeoutError, ConnectionError):
        pass
    return [json.loads(line) for line in text.splitlines()]


@cache
def _local_agents() -> LocalAgents:
    return LocalAgents()


def local_client(data: bytes) -> None:
    """Every line gets an answer or none, in lines of JSON, and the next request is answered as before."""
    kept().run(_local_agents().play(data))


def daemon_lines(data: bytes) -> None:
    """Whatever the daemon says, its client goes on or connects again, and shows tools that can be called."""
    kept().run(_daemon_lines(data))


async def _daemon_lines(data: bytes) -> None:
    lines = LogLines()
    log = make_logger("kubelet", lines)
    toolbox = Toolbox(log)
    ulids, registry, kinds = UlidSource(lambda: NOW_MS, os.urandom), _registry(), _kinds()
    make_own = partial(
        OwnTools, handlers=[], registry=registry, kinds=kinds, ulids=ulids, now_ms=lambda: NOW_MS, log=log
    )
    tools = AgentTools(toolbox, make_own, ulids.new)
    backoff = Backoff(0.5, 1.0)
    client = DaemonClient(directory() / "none", ANT, tools, backoff, log, sleep=_never)
    (reader, writer), (_, far_writer) = await _connected()
    serving = asyncio.create_task(client._serve(reader, writer))  # noqa: SLF001 - without a socket's file
    far_writer.write(data + b"\n")
    await asyncio.sleep(_SETTLED_S)
    for entry in toolbox.entries():
        await tools.call(client.request, str(entry["name"]), {"wait_ms": 0})
    far_writer.close()
    await asyncio.wait([serving])
    serving.result()
    await tools.close()
    check_log(lines)


async def _never(_seconds: float) -> None:
    await asyncio.Event().wait()


@cache
def _registry() -> SchemaRegistry:
    return SchemaRegistry()


@cache
def _kinds() -> KindRegistry:
    return KindRegistry()


class StatusProcess:
    """A process that says at the socket of its status what it is given."""

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.directory = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path / NAME))
        self._listener.listen()

    @contextmanager
    def saying(self, data: bytes) -> Iterator[None]:
        """Say ``data`` to the one client that connects during the block."""
        # Ends with the block: libFuzzer waits for every thread when it ends the process.
        thread = threading.Thread(target=self._say, args=(data,))
        thread.start()
        yield
        thread.join()

    def _say(self, data: bytes) -> None:
        connection, _ = self._listener.accept()
        with connection, suppress(OSError):
            connection.sendall(data)


@cache
def _status_process() -> StatusProcess:
    return StatusProcess(directory() / "status")


def status_answer(data: bytes) -> None:
    """What a process says of itself is shown in printable lines, or is another version's."""
    process = _status_process()
    with process.saying(data):
        status = tried(lambda: read_status(process.directory), StalledError)
    if status is REFUSED:
        return
    for lines_of in (kubelet_status._lines_of, relay_status._lines_of):  # noqa: SLF001 - the commands' own
        for as_json in (False, True):
            shown = io.StringIO()
            tried(
                partial(show, lambda: status, lines_of, as_json=as_json, watch=False, stream=shown),
                AnotherVersionError,
            )
            assert all(line.isprintable() for line in shown.getvalue().split("\n"))


TARGETS: Final = {
    "local_client": Target(local_client, samples.CLIENT_LINES, by_lines=True),
    "daemon_lines": Target(daemon_lines, samples.DAEMON_LINES, by_lines=True),
    "status_answer": Target(status_answer, samples.STATUSES),
}
