"""A live relay and a hostile node: whatever the node sends, its session goes on or is closed as declared.

Another node is connected to the same relay, and is called after every input.
"""

import asyncio
from functools import cache
from typing import Any, Final

from relay.routing.port import Command
from schemas.errors import ToolError
from schemas.frames import MAX_FRAME_BYTES, FrameReader
from schemas.registry import SchemaRegistry
from tests.fakes.hub import Hub
from tests.fakes.node_end import NodeEnd, device_token
from tests.fakes.served_relay import ServedRelay
from tests.fakes.serving import Server
from tests.fakes.signer import OTHER_NODE_ID
from tests.fuzz import samples
from tests.fuzz.frame_counts import CountingReader
from tests.fuzz.live import (
    BETWEEN_INPUTS_S,
    MOST_TASKS,
    Lines,
    check_log,
    check_outcome,
    kept,
    outcome,
    read_frame,
)
from tests.fuzz.mutation import mutated_lines
from tests.fuzz.scratch import directory
from tests.fuzz.target import Target

_CORRELATION_ID: Final = "01HZX9K3M4P7Q8R9S0T1V2W3XW"


async def opened(name: str) -> ServedRelay:
    """Return a relay that lasts as long as the loop, with a state directory of that ``name``."""
    stack, loop = kept().stack, kept().loop
    server = await stack.enter_async_context(Server.running())
    url = f"http://{server.address}"
    hub = Hub(directory() / name, SchemaRegistry(), ca=samples.CA, public_url=url, monotonic=loop.time)
    return await stack.enter_async_context(ServedRelay.open(hub, server, notify_interval_s=60))


class RelayStage:
    """The relay, the hostile node's identity, and the other node with its session."""

    def __init__(self, relay: ServedRelay, other: NodeEnd) -> None:
        self._relay = relay
        self._other = other
        self._node = samples.NODE
        self._read = FrameReader(relay.hub.registry)
        # The relay's own reader.
        relay.sessions._reader = CountingReader(relay.hub.registry)  # noqa: SLF001

    @classmethod
    async def opened(cls) -> "RelayStage":
        """Return a stage that lasts as long as the loop."""
        relay = await opened("sessions")
        other = await kept().stack.enter_async_context(relay.session(samples.CA.issue(OTHER_NODE_ID)))
        return cls(relay, other)

    async def play(self, lines: Lines) -> None:
        """Send ``lines``, wait for what becomes of the session, and call the other node."""
        calling: asyncio.Task[Any] | None = None
        if lines.state == b"stranger":
            reader, writer = await self._relay.upgraded()
            challenge = self._read.read((await read_frame(reader))[1], MAX_FRAME_BYTES)
            names = {b"@ASKED@": challenge.msg_id, b"@TOKEN@": device_token(self._node, challenge.payload)}
        else:
            reader, writer = await self._relay.admitted(self._node)
            names = {}
            if lines.state == b"call":
                calling = asyncio.create_task(self._relay.sessions.run(_command(self._node.node_id)))
                names[b"@CALL@"] = self._read.read((await read_frame(reader))[1], MAX_FRAME_BYTES).msg_id
        try:
            writer.write(lines.wire(names, masked=True))
            check_outcome(await outcome(reader), lines)
            await self._check_call(calling)
        finally:
            writer.transport.abort()
        await asyncio.sleep(BETWEEN_INPUTS_S)
        await self._check_other()
        check_log(self._relay.hub.lines)
        assert len(asyncio.all_tasks()) < MOST_TASKS

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
        assert await calling == {"ok": True, "result": {"message": "ping"}}


def _command(node_id: str) -> Command:
    return Command(node_id, f"sysecho.{node_id}.echo.invoke", {"message": "ping"}, 10_000, _CORRELATION_ID)


@cache
def _stage() -> RelayStage:
    return kept().run(RelayStage.opened())


def live_relay(data: bytes) -> None:
    """The session goes on or is closed with a declared code; another node's call is answered as before."""
    kept().run(_stage().play(Lines.of(data)))


TARGETS: Final = {
    "live_relay": Target(
        live_relay, samples.NODE_LINES, max_bytes=1 << 14, mutated=mutated_lines, by_lines=True, share=8
    )
}
