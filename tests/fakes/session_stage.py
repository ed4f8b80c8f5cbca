"""The nodes' endpoint of one relay, and the commands that a test runs by it."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from relay.fleet.node_record import NodeRecord
from relay.http.websocket_protocol import BoundedWebSocket
from relay.routing.port import Command
from relay.sessions.node_sessions import NodeSessions
from schemas.errors import Failure, ToolError
from schemas.frames import SUBPROTOCOL, Frame, FrameReader
from tests.fakes.frames import PAYLOADS, message
from tests.fakes.hub import Hub
from tests.fakes.node_end import BOOT_ID, NodeEnd, device_token
from tests.fakes.scripted_socket import ScriptedSocket
from tests.fakes.serving import Server
from tests.fakes.signer import NODE_ID, NOW_MS, TENANT, SimulatedNode

BOUND_S = 30
RESULT = {"message": "ping", "received_at_ms": NOW_MS, "node_id": NODE_ID}
STRANGE_ID = "01HZX9K3M4P7Q8R9S0T1V2W3XZ"


def command(deadline_ms: int = 10_000, node_id: str = NODE_ID, **arguments: Any) -> Command:
    return Command(
        node_id=node_id,
        tool=f"sysecho.{node_id}.echo.invoke",
        arguments=arguments or {"message": "ping"},
        deadline_ms=deadline_ms,
        correlation_id="01HZX9K3M4P7Q8R9S0T1V2W3XW",
    )


class Stage:
    """The nodes' endpoint of one relay."""

    def __init__(self, hub: Hub, sessions: NodeSessions, reader: FrameReader, server: Server) -> None:
        self.hub = hub
        self.sessions = sessions
        self.node = hub.ca.issue()
        self.address = server.address
        self._reader = reader
        self._ended: asyncio.Queue[None] = asyncio.Queue()
        server.serve_socket = self._serve

    async def _serve(self, socket: BoundedWebSocket) -> None:
        try:
            await self.sessions.serve(socket)
        finally:
            self._ended.put_nowait(None)

    async def until_ended(self) -> None:
        """Wait until the relay is done with a connection."""
        await asyncio.wait_for(self._ended.get(), BOUND_S)

    def end(
        self, node: SimulatedNode | None = None, subprotocols: Sequence[str] = (SUBPROTOCOL,)
    ) -> AbstractAsyncContextManager[NodeEnd]:
        return NodeEnd.connected(self.address, node or self.node, self._reader, subprotocols)

    @asynccontextmanager
    async def open(
        self,
        boot_id: str = BOOT_ID,
        resume: str | None = None,
        subprotocols: Sequence[str] = (SUBPROTOCOL,),
    ) -> AsyncIterator[NodeEnd]:
        """Hold a connection whose handshake is done."""
        async with self.end(subprotocols=subprotocols) as end:
            await end.authenticate(boot_id, resume=resume)
            yield end

    def run(self, wanted: Command | None = None) -> asyncio.Task[Mapping[str, Any]]:
        return asyncio.create_task(self.sessions.run(wanted or command()))

    async def sent(
        self, end: NodeEnd, wanted: Command | None = None
    ) -> tuple[asyncio.Task[Mapping[str, Any]], Frame]:
        """Run a command, and return its task and the frame that ``end`` has received for it."""
        task = self.run(wanted)
        return task, await end.receive("cmd")

    def known(self) -> NodeRecord:
        (node,) = self.hub.nodes_of(TENANT)
        return node

    def sessions_counted(self, event: str) -> float:
        return self.hub.counted("sessions_total", event=event)


async def answer(task: asyncio.Task[Mapping[str, Any]]) -> Mapping[str, Any]:
    return await asyncio.wait_for(task, BOUND_S)


async def succeeds(end: NodeEnd, frame: Frame, task: asyncio.Task[Mapping[str, Any]]) -> None:
    """Answer a command, and check that its caller gets that answer."""
    await end.acknowledge(frame, RESULT)
    assert await answer(task) == {"ok": True, "result": RESULT}


async def failure(task: asyncio.Task[Mapping[str, Any]]) -> Failure:
    with pytest.raises(ToolError) as caught:
        await answer(task)
    return caught.value.failure


async def goes_on(end: NodeEnd) -> None:
    """Check that the session is as good as before."""
    msg_id = await end.send("heartbeat", PAYLOADS["heartbeat"])
    acknowledged = await end.receive("heartbeat_ack")
    assert acknowledged.in_reply_to == msg_id


async def dropped(stage: Stage, reason: str) -> None:
    line = await stage.hub.lines.until("frame dropped")
    assert (line["reason"], line["node_id"]) == (reason, NODE_ID)
    assert stage.hub.counted("frames_dropped_total", reason=reason) == 1
    stage.hub.refusals.write()
    assert stage.hub.audited()[-1] == {
        "ts_ms": NOW_MS,
        "event": "frame_dropped",
        "source": NODE_ID,
        "reason": reason,
        "count": 1,
    }


async def admit(socket: ScriptedSocket, node: SimulatedNode) -> None:
    """Go through the handshake as ``node``, up to its answer, on a connection without a server."""
    while not socket.sent:  # noqa: ASYNC110 - the event is in the application under test
        await asyncio.sleep(0)
    challenge = json.loads(socket.sent[-1])
    auth = message("auth", 2, node_id=NODE_ID, certificate=node.leaf_pem)
    auth["payload"]["token"] = device_token(node, challenge["payload"])
    socket.put(json.dumps(auth | {"in_reply_to": challenge["msg_id"]}))
