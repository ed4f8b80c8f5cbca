import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from relay.http.websocket_protocol import FRAMES_AT_ONCE, FrameMeter
from relay.routing.port import NodeRef
from relay.sessions.one_way_frames import MAX_QUEUED_BYTES, OneWayFrames
from schemas.caller_tools import MAX_PENDING
from schemas.errors import Failure, ToolError
from schemas.frames import FrameReader, OneWayType
from tests.fakes.frames import PAYLOADS
from tests.fakes.hub import Hub
from tests.fakes.node_end import BOOT_ID, OTHER_BOOT_ID, NodeEnd
from tests.fakes.seconds import Seconds
from tests.fakes.serving import Server
from tests.fakes.signer import NODE_ID, TENANT
from tests.relay.http.test_websocket_parts import MESSAGE, taken

pytestmark = pytest.mark.asyncio(loop_scope="module")

LEASE = PAYLOADS["telemetry_lease"]
SAMPLE = PAYLOADS["telemetry"]
BOUND_S = 30


class Stage:
    """The nodes' endpoint of one relay, and what its one-way frames report."""

    def __init__(self, hub: Hub, server: Server, reader: FrameReader) -> None:
        self.hub = hub
        self.node = hub.ca.issue()
        self.frames = hub.one_way = OneWayFrames(hub.metrics, hub.log)
        self.received: asyncio.Queue[tuple[NodeRef, Mapping[str, Any]]] = asyncio.Queue()
        self.links: asyncio.Queue[tuple[NodeRef, bool]] = asyncio.Queue()
        self.frames.on_frame(
            OneWayType.TELEMETRY, lambda node, payload: self.received.put_nowait((node, payload))
        )
        self.frames.on_connection(lambda node, connected: self.links.put_nowait((node, connected)))
        self._address = server.address
        self._reader = reader
        server.serve_socket = hub.sessions().serve

    @asynccontextmanager
    async def open(self, boot_id: str = BOOT_ID, resume: str | None = None) -> AsyncIterator[NodeEnd]:
        """Hold a session, which the relay has taken in."""
        async with NodeEnd.connected(self._address, self.node, self._reader) as end:
            await end.authenticate(boot_id, resume=resume)
            assert await self.link() == (NodeRef(TENANT, NODE_ID, end.session_id), True)
            yield end

    async def link(self) -> tuple[NodeRef, bool]:
        return await asyncio.wait_for(self.links.get(), BOUND_S)

    def refused(self) -> Failure:
        with pytest.raises(ToolError) as caught:
            self.frames.send(NODE_ID, OneWayType.TELEMETRY_LEASE, LEASE)
        return caught.value.failure


@pytest.fixture
def stage(hub: Hub, server: Server, reader: FrameReader) -> Stage:
    return Stage(hub, server, reader)


async def test_frames_are_sent_in_order_and_without_an_answer(stage: Stage) -> None:
    async with stage.open() as end:
        for ttl_ms in range(3):
            stage.frames.send(NODE_ID, OneWayType.TELEMETRY_LEASE, {**LEASE, "ttl_ms": ttl_ms})
        frames = [await end.receive("telemetry_lease") for _ in range(3)]
    assert [frame.payload["ttl_ms"] for frame in frames] == [0, 1, 2]
    assert stage.hub.counted("one_way_frames_total", type="telemetry_lease", event="sent") == 3


async def test_a_frame_of_a_node_is_handed_over_with_its_session(stage: Stage) -> None:
    async with stage.open() as end:
        await end.send("telemetry", SAMPLE)
        received = await asyncio.wait_for(stage.received.get(), BOUND_S)
        assert received == (NodeRef(TENANT, NODE_ID, end.session_id), SAMPLE)


async def test_a_node_without_a_connection_is_offline(stage: Stage) -> None:
    assert stage.refused() is Failure.NODE_OFFLINE
    async with stage.open():
        pass
    _, connected = await stage.link()
    assert not connected
    assert stage.refused() is Failure.NODE_OFFLINE


async def test_followers_learn_of_a_resumed_session_by_the_same_id(stage: Stage) -> None:
    async with stage.open() as end:
        session_id = end.session_id
    assert (await stage.link())[1] is False
    async with stage.open(resume=session_id) as end:
        assert end.session_id == session_id


async def test_a_session_that_is_superseded_is_connected_twice_in_a_row(stage: Stage) -> None:
    async with stage.open(), stage.open(OTHER_BOOT_ID) as newer:
        stage.frames.send(NODE_ID, OneWayType.TELEMETRY_LEASE, LEASE)
        await newer.receive("telemetry_lease")
    ref, connected = await stage.link()
    assert (ref.session_id, connected) == (newer.session_id, False)
    assert stage.links.empty()


async def test_a_frame_beyond_the_rate_or_the_size_of_its_type_is_not_sent(stage: Stage) -> None:
    async with stage.open() as end:
        with pytest.raises(ToolError) as caught:
            stage.frames.send(NODE_ID, OneWayType.TELEMETRY_LEASE, {"cap_id": "x" * 4096})
        assert caught.value.failure is Failure.INTERNAL
        at_once = int(OneWayType.TELEMETRY_LEASE.burst) // 2
        for _ in range(at_once):
            stage.frames.send(NODE_ID, OneWayType.TELEMETRY_LEASE, LEASE)
        assert stage.refused() is Failure.RATE_LIMITED
        # All of them: a close that comes behind frames that are not taken is waited for in vain, for 10 s.
        for _ in range(at_once):
            await end.receive("telemetry_lease")


async def test_a_handler_with_a_bug_does_not_end_the_session(stage: Stage) -> None:
    def fails(_node: NodeRef, _payload: Mapping[str, Any]) -> None:
        raise ZeroDivisionError

    frames = OneWayFrames(stage.hub.metrics, stage.hub.log)
    stage.frames.on_connection(lambda _node, _connected: fails(_node, {}))
    with pytest.raises(ValueError, match="telemetry has a handler"):
        stage.frames.on_frame(OneWayType.TELEMETRY, fails)
    frames.on_frame(OneWayType.TELEMETRY, fails)
    async with stage.open() as end:
        await stage.hub.lines.until("connection not followed")
        await end.send("heartbeat", PAYLOADS["heartbeat"])
        await end.receive("heartbeat_ack")


def connected(hub: Hub, connection: Any) -> tuple[OneWayFrames, Any]:
    """Return frames to a node that is connected by ``connection``, and its session."""
    frames, node = OneWayFrames(hub.metrics, hub.log), hub.ca.issue()
    identity = hub.fleet.identify(NODE_ID, node.leaf_pem)
    session: Any = type("Session", (), {"identity": identity, "session_id": "S"})
    frames.connected(session, connection)
    return frames, session


async def test_what_waits_for_a_node_that_does_not_read_is_bounded(hub: Hub) -> None:
    class Unread:
        """A connection that takes nothing."""

        is_open = True

        def encoded(self, _type: str, _payload: Mapping[str, Any]) -> str:
            return "x" * 60_000

        async def send_text(self, _text: str) -> None:
            await asyncio.Event().wait()

    frames, session = connected(hub, Unread())
    for _ in range(1 + MAX_QUEUED_BYTES // 60_000):
        frames.send(NODE_ID, OneWayType.TELEMETRY_LEASE, LEASE)
    with pytest.raises(ToolError) as caught:
        frames.send(NODE_ID, OneWayType.TELEMETRY_LEASE, LEASE)
    assert caught.value.failure is Failure.RATE_LIMITED
    assert hub.counted("one_way_frames_total", type="telemetry_lease", event="refused") == 1
    frames.lost(session)
    with pytest.raises(ToolError, match="E_NODE_OFFLINE"):
        frames.send(NODE_ID, OneWayType.TELEMETRY_LEASE, LEASE)


@pytest.mark.parametrize(
    ("type_", "at_least"),
    [
        (OneWayType.SESSION_OPEN, MAX_PENDING),
        (OneWayType.SESSION_MESSAGE, 1),
        (OneWayType.CALLER_TOOL_RESULT, 1),
        (OneWayType.SESSION_END, 0),
    ],
)
async def test_a_frame_that_a_local_agent_answers_lets_its_node_send_more(
    hub: Hub, type_: OneWayType, at_least: int
) -> None:
    class Connection:
        """A connection that sends at once."""

        is_open = True

        def __init__(self) -> None:
            self.meter = FrameMeter(Seconds())

        def encoded(self, _type: str, _payload: Mapping[str, Any]) -> str:
            return ""

        async def send_text(self, _text: str) -> None:
            return

    connection = Connection()
    connection.meter.admit()
    frames, session = connected(hub, connection)
    assert taken(connection.meter, MESSAGE)[0] == FRAMES_AT_ONCE
    frames.send(NODE_ID, type_, PAYLOADS[type_])
    assert taken(connection.meter, MESSAGE)[0] >= at_least
    frames.lost(session)
