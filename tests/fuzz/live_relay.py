"""A live relay and a hostile node: whatever the node sends, its session goes on or is closed as declared.

Another node is connected to the same relay, and is called after every input.
"""

import asyncio
from contextlib import suppress
from functools import cache
from typing import Any, Final

from relay.routing.port import Command
from schemas.errors import ToolError
from schemas.frames import MAX_FRAME_BYTES, FrameReader
from schemas.registry import SchemaRegistry
from tests.fakes.hub import Hub
from tests.fakes.node_end import NodeEnd, device_token
from tests.fakes.raw_websocket import ws_frame
from tests.fakes.served_relay import ServedRelay
from tests.fakes.serving import Server
from tests.fakes.signer import OTHER_NODE_ID
from tests.fuzz import samples
from tests.fuzz.live import CountingReader, Lines, check_closed, check_log, counts, loop
from tests.fuzz.mutation import mutated_lines
from tests.fuzz.scratch import directory
from tests.fuzz.target import Target

BOUND_S: Final = 20
_MARK: Final = b"all that was sent was read"
_TEXT, _CLOSE, _PING, _PONG = 1, 8, 9, 10
_MOST_TASKS: Final = 100
_CORRELATION_ID: Final = "01HZX9K3M4P7Q8R9S0T1V2W3XW"


class RelayStage:
    """The relay, the hostile node's identity, and the other node with its session."""

    def __init__(self, relay: ServedRelay, other: NodeEnd) -> None:
        self._relay = relay
        self._other = other
        self._node = samples.NODE
        self._read = FrameReader(relay.hub.registry)
        self._counted = CountingReader(relay.hub.registry)
        # The relay's own reader: what it has read is counted, and not what was sent.
        relay.sessions._reader = self._counted  # noqa: SLF001

    @classmethod
    async def opened(cls) -> "RelayStage":
        """Return a stage that lasts as long as the loop."""
        stack = loop().stack
        server = await stack.enter_async_context(Server.running())
        url = f"http://{server.address}"
        hub = Hub(directory() / "live", SchemaRegistry(), ca=samples.CA, public_url=url)
        relay = await stack.enter_async_context(ServedRelay.open(hub, server))
        other = await stack.enter_async_context(relay.session(samples.CA.issue(OTHER_NODE_ID)))
        return cls(relay, other)

    async def play(self, lines: Lines) -> None:
        """Send ``lines``, wait for what becomes of the session, and call the other node."""
        self._counted.count = 0
        calling: asyncio.Task[Any] | None = None
        if lines.state == b"stranger":
            reader, writer = await self._relay.upgraded()
            challenge = self._read.read((await _read(reader))[1], MAX_FRAME_BYTES)
            names = {b"@ASKED@": challenge.msg_id, b"@TOKEN@": device_token(self._node, challenge.payload)}
        else:
            reader, writer = await self._relay.admitted(self._node)
            names = {}
            if lines.state == b"call":
                calling = asyncio.create_task(self._relay.sessions.run(_command(self._node.node_id)))
                names[b"@CALL@"] = self._read.read((await _read(reader))[1], MAX_FRAME_BYTES).msg_id
        try:
            code = await self._exchanged(reader, writer, _wire(lines, names))
            if code != 0:
                check_closed(code, lines)
            await self._check_call(calling)
        finally:
            writer.transport.abort()
        await self._check_other()
        check_log(self._relay.hub.lines)
        assert len(asyncio.all_tasks()) < _MOST_TASKS
        counts().add(len(lines.frames), self._counted.count)

    async def _exchanged(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, wire: bytes
    ) -> int | None:
        """Return the code with which the relay closes; 0 if it goes on."""
        with suppress(ConnectionError):
            writer.write(wire + ws_frame(_MARK, opcode=_PING))
            async with asyncio.timeout(BOUND_S):
                while True:
                    opcode, payload = await _read(reader)
                    if opcode == _PONG and payload == _MARK:
                        return 0
                    if opcode == _CLOSE:
                        return int.from_bytes(payload[:2], "big")
        return None

    async def _check_call(self, calling: "asyncio.Task[Any] | None") -> None:
        """Assert that a call in flight has ended with what may be an answer, or still waits for one."""
        if calling is None:
            return
        await asyncio.sleep(0)
        if not calling.done():
            calling.cancel()
        try:
            answer = await calling
        except (ToolError, asyncio.CancelledError):
            return
        assert answer["ok"] in {True, False}

    async def _check_other(self) -> None:
        """Assert that the other node's session works as before."""
        calling = asyncio.create_task(self._relay.sessions.run(_command(OTHER_NODE_ID)))
        command = await self._other.receive("cmd")
        await self._other.acknowledge(command, {"message": "ping"})
        assert (await calling)["result"] == {"message": "ping"}


def _command(node_id: str) -> Command:
    return Command(node_id, f"sysecho.{node_id}.echo.invoke", {"message": "ping"}, 10_000, _CORRELATION_ID)


def _wire(lines: Lines, names: dict[bytes, str]) -> bytes:
    """Return the bytes of all frames, with what the names stand for."""
    wire = b""
    for line in lines.frames:
        for name, value in names.items():
            line = line.replace(name, value.encode())  # noqa: PLW2901 - step by step
        wire += line[1:] if line.startswith(b"!") else ws_frame(line)
    return wire


async def _read(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Return opcode and payload of the next frame; of the end of the connection, a close without a code."""
    try:
        first, size = await reader.readexactly(2)
        if size > 125:
            size = int.from_bytes(await reader.readexactly(2 if size == 126 else 8), "big")
        return first & 0x0F, await reader.readexactly(size)
    except asyncio.IncompleteReadError:
        raise ConnectionResetError from None


@cache
def _stage() -> RelayStage:
    made: list[RelayStage] = []

    async def make() -> None:
        made.append(await RelayStage.opened())

    loop().run(make())
    return made[0]


def live_relay(data: bytes) -> None:
    """The session goes on or is closed with a declared code; another node's call is answered as before."""
    loop().run(_stage().play(Lines.of(data)))


TARGETS: Final = {
    "live_relay": Target(live_relay, samples.NODE_LINES, max_bytes=1 << 14, mutated=mutated_lines, share=8)
}
