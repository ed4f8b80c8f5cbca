"""How a relay ends sessions: the protocol broken, too many connections, a leaf revoked."""

import asyncio
import gc
import json
from collections import Counter

import pytest

from relay.http.http_protocol import BoundedHttp
from relay.http.websocket_protocol import BoundedWebSocket
from relay.sessions.connects import ConnectLimiter
from relay.sessions.session import NodeConnection
from schemas.errors import Failure
from schemas.frames import MAX_FRAME_BYTES, MAX_FRAME_BYTES_BEFORE_WELCOME, FrameReader
from schemas.identity import Identity
from schemas.session import CloseCode
from tests.fakes.frames import frame_text
from tests.fakes.hub import Hub
from tests.fakes.node_end import OTHER_BOOT_ID
from tests.fakes.polling import until
from tests.fakes.scripted_socket import ScriptedSocket
from tests.fakes.serving import Server
from tests.fakes.session_stage import BOUND_S, Stage, admit, command, failure, goes_on
from tests.fakes.signer import NODE_ID, NOW_MS, OTHER_NODE_ID, TENANT

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        pytest.param(b"binary", 4009, id="binary"),
        pytest.param("garbage \x1b[31m", 4009, id="garbage"),
        pytest.param('{"type":"heartbeat","type":"heartbeat"}', 4009, id="a key twice"),
        pytest.param(frame_text("bye").replace("bye", "hello"), 4009, id="an unknown type"),
        pytest.param(frame_text("heartbeat", inflight=-1), 4009, id="outside its schema"),
        pytest.param(frame_text("challenge"), 4009, id="what only a relay may say"),
        pytest.param(frame_text("auth"), 4009, id="a second handshake"),
        pytest.param(frame_text("heartbeat") + " " * MAX_FRAME_BYTES, 1009, id="over 256 KiB"),
    ],
)
async def test_breaking_the_protocol_ends_the_session(stage: Stage, raw: str | bytes, code: int) -> None:
    async with stage.open() as end:
        await end.send_raw(raw)
        assert await end.until_closed() == (code, [])
        await stage.until_ended()
        assert await failure(stage.run()) is Failure.NODE_OFFLINE
        assert "\x1b" not in stage.hub.lines.getvalue()
        assert stage.hub.counted("nodes_connected") == 0


async def test_a_large_frame_is_welcome_once_the_node_is(stage: Stage) -> None:
    async with stage.open() as end:
        await end.send("announce", {"padding": "x" * (MAX_FRAME_BYTES_BEFORE_WELCOME * 2)})
        assert (await end.receive("announce_ack")).payload["ok"] is False
        await goes_on(end)


async def test_after_a_goodbye_the_relay_closes_in_good_order(stage: Stage) -> None:
    async with stage.open() as end:
        await end.send("bye", {"reason": "shutting_down"})
        assert await end.until_closed() == (1000, [])
    await stage.until_ended()
    assert not stage.known().connected
    assert stage.sessions_counted("bye") == 1
    assert await failure(stage.run()) is Failure.NODE_OFFLINE


def parts_of_connections() -> Counter[type]:
    """Count what a node's connection consists of, as far as it is in memory."""
    parts = (BoundedHttp, BoundedWebSocket, NodeConnection)
    return Counter(type(each) for each in gc.get_objects() if type(each) in parts)


async def test_a_lost_connection_leaves_nothing_to_the_garbage_collector(stage: Stage) -> None:
    gc.collect()
    gc.disable()
    try:
        before = parts_of_connections()
        async with stage.open() as end:
            await goes_on(end)
            assert parts_of_connections() > before
        await stage.until_ended()
        await until(lambda: parts_of_connections() == before)
    finally:
        gc.enable()


async def test_a_relay_that_is_overrun_says_when_to_come_again_before_it_asks_who_it_is(
    hub: Hub, reader: FrameReader, server: Server
) -> None:
    stage = Stage(hub, hub.sessions(connect_limiter=ConnectLimiter(rate=0.001, burst=1)), reader, server)
    async with stage.open() as first:
        for _ in range(2):
            async with stage.end() as second:
                code, frames = await second.until_closed()
            assert (code, [frame.type for frame in frames]) == (4013, ["bye"])
            assert frames[0].payload == {"reason": "over_capacity", "retry_after_ms": 60_001}
        await goes_on(first)
        assert stage.sessions_counted("sent_away") == 2
        assert stage.sessions_counted("opened") == 1


async def test_one_address_keeps_no_other_out(hub: Hub) -> None:
    sessions = hub.sessions(connect_limiter=ConnectLimiter(rate=0.001, burst=2))
    last: list[str] = []
    for address in ("192.0.2.1", "192.0.2.1", "192.0.2.2"):
        socket = ScriptedSocket(address=address)
        serving_it = asyncio.create_task(sessions.serve(socket))
        socket.put(1006)
        await asyncio.wait_for(serving_it, BOUND_S)
        last.append(json.loads(socket.sent[0])["type"])
    assert last == ["challenge", "bye", "challenge"]


def is_any_node(_leaf: Identity) -> bool:
    return True


async def test_a_frame_on_its_way_when_the_relay_closes_breaks_no_protocol(hub: Hub) -> None:
    sessions, socket = hub.sessions(), ScriptedSocket()
    serving_it = asyncio.create_task(sessions.serve(socket))
    async with asyncio.timeout(BOUND_S):
        await admit(socket, hub.ca.issue())
        while len(socket.sent) < 2:  # noqa: ASYNC110 - the event is in the application under test
            await asyncio.sleep(0)
        sessions.end_sessions(is_any_node, CloseCode.REVOKED)
        while not socket.closes:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0)
        socket.put(frame_text("heartbeat"))
        socket.put(4003)
        await serving_it
    assert hub.counted("sessions_total", event="protocol_violation") == 0
    assert not hub.audit_file.read_text()


async def test_who_is_shut_out_is_closed_and_its_calls_end(stage: Stage) -> None:
    async with stage.open() as end:
        task, _ = await stage.sent(end)
        assert stage.sessions.end_sessions(is_any_node, CloseCode.REVOKED) == [NODE_ID]
        assert await failure(task) is Failure.ATTESTATION_FAILED
        assert await failure(stage.run()) is Failure.NODE_OFFLINE
        assert (await end.until_closed())[0] == 4003
    await stage.until_ended()
    assert not stage.known().connected
    assert stage.hub.counted("nodes_connected") == 0
    assert stage.sessions.end_sessions(is_any_node, CloseCode.REVOKED) == []


async def test_a_call_that_waits_for_a_lost_connection_to_come_back_ends_when_its_node_is_shut_out(
    stage: Stage,
) -> None:
    async with stage.open() as end:
        task, _ = await stage.sent(end)
    await stage.until_ended()
    assert stage.sessions.end_sessions(is_any_node, CloseCode.REVOKED) == [NODE_ID]
    assert await failure(task) is Failure.ATTESTATION_FAILED


async def test_who_was_shut_out_cannot_resume(stage: Stage) -> None:
    async with stage.open() as end:
        stage.sessions.end_sessions(is_any_node, CloseCode.REVOKED)
        await end.until_closed()
    async with stage.end() as again:
        welcome = await again.authenticate(resume=end.session_id)
        assert welcome.payload["resumed"] is False
        assert welcome.payload["session_id"] != end.session_id


async def test_only_the_leaves_that_are_meant_are_shut_out(stage: Stage) -> None:
    other = stage.hub.ca.issue(OTHER_NODE_ID)
    async with stage.open() as end, stage.end(other) as others_end:
        await others_end.authenticate()
        assert stage.sessions.end_sessions(lambda leaf: leaf.kid == other.kid, CloseCode.AUTH_FAILED) == [
            OTHER_NODE_ID
        ]
        assert await others_end.until_closed() == (4001, [])
        await goes_on(end)


async def test_a_command_on_a_connection_that_breaks_under_it_is_waited_for_until_its_deadline(
    hub: Hub,
) -> None:
    node, sessions, socket = hub.ca.issue(), hub.sessions(), ScriptedSocket()
    serving_it = asyncio.create_task(sessions.serve(socket))
    async with asyncio.timeout(BOUND_S):
        await admit(socket, node)
        while len(socket.sent) < 2:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0)
        socket.breaks_at = 0  # whatever is sent from now on
        # It may have arrived in part, and the same process may come back for it: not offline.
        assert (
            await failure(asyncio.create_task(sessions.run(command(deadline_ms=20))))
            is Failure.DEADLINE_EXCEEDED
        )
        socket.put(1006)
        await serving_it
    assert hub.counted("nodes_connected") == 0


async def test_a_command_to_a_node_that_does_not_read_ends_at_its_deadline(hub: Hub) -> None:
    node, sessions, socket = hub.ca.issue(), hub.sessions(), StoppedSocket("cmd")
    serving_it = asyncio.create_task(sessions.serve(socket))
    async with asyncio.timeout(BOUND_S):
        await admit(socket, node)
        while len(socket.sent) < 2:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0)
        task = asyncio.create_task(sessions.run(command(deadline_ms=20)))
        await socket.stopped.wait()
        assert await failure(task) is Failure.DEADLINE_EXCEEDED
        socket.put(1006)
        await serving_it


class StoppedSocket(ScriptedSocket):
    """A connection whose other end stops reading with one type of frame, until the test lets it go on."""

    def __init__(self, type_: str = "welcome") -> None:
        super().__init__()
        self._type = f'"type":"{type_}"'
        self.stopped = asyncio.Event()
        self.goes_on = asyncio.Event()

    async def send(self, text: str) -> None:
        if self._type in text:
            self.stopped.set()
            await self.goes_on.wait()
        await super().send(text)


async def test_who_is_shut_out_while_the_welcome_is_on_its_way_is_not_connected_afterwards(hub: Hub) -> None:
    node, sessions, socket = hub.ca.issue(), hub.sessions(), StoppedSocket()
    serving_it = asyncio.create_task(sessions.serve(socket))
    async with asyncio.timeout(BOUND_S):
        await admit(socket, node)
        await socket.stopped.wait()
        assert sessions.end_sessions(is_any_node, CloseCode.REVOKED) == [NODE_ID]
        socket.goes_on.set()
        socket.put(4003)
        await serving_it
    assert not hub.nodes_of(TENANT)[0].connected
    assert hub.counted("nodes_connected") == 0


async def test_no_command_overtakes_the_welcome(hub: Hub) -> None:
    node, sessions, socket = hub.ca.issue(), hub.sessions(), StoppedSocket()
    serving_it = asyncio.create_task(sessions.serve(socket))
    async with asyncio.timeout(BOUND_S):
        await admit(socket, node)
        await socket.stopped.wait()
        # Nothing was sent, so that it can be called again.
        assert await failure(asyncio.create_task(sessions.run(command()))) is Failure.NODE_OFFLINE
        socket.goes_on.set()
        socket.put(frame_text("heartbeat", 9))
        while '"type":"heartbeat_ack"' not in socket.sent[-1]:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0)
        types = [json.loads(sent)["type"] for sent in socket.sent]
        assert types == ["challenge", "welcome", "heartbeat_ack"]
        socket.put(1006)
        await serving_it


async def test_machines_that_take_an_identity_from_each_other_fill_no_log(stage: Stage) -> None:
    async with stage.open() as first, stage.open(OTHER_BOOT_ID) as second:
        assert (await first.until_closed())[0] == 4008
        async with stage.open() as third:
            assert (await second.until_closed())[0] == 4008
            await goes_on(third)
    assert stage.sessions_counted("duplicate_identity") == 2
    assert len(stage.hub.lines.entries("two machines use one identity; the newer stays")) == 1


async def test_a_session_ends_when_its_leaf_expires_and_not_before(stage: Stage) -> None:
    ends_ms = stage.node.identity().not_after_ms
    async with stage.open() as end:
        for now_ms in (ends_ms - 1, ends_ms):
            await goes_on(end)
            stage.hub.clock.now_ms = now_ms
            stage.sessions.end_expired()
        assert await end.until_closed() == (4001, [])
    await stage.until_ended()
    stage.sessions.end_expired()
    assert stage.sessions_counted("shut_out") == 1


async def test_after_the_clock_was_set_back_a_leaf_of_the_future_ends_its_session(
    stage: Stage,
) -> None:
    async with stage.open() as end:
        stage.sessions.end_expired()
        await goes_on(end)
        stage.hub.clock.now_ms = stage.node.identity().not_before_ms - 1
        stage.sessions.end_expired()
        assert await end.until_closed() == (4001, [])


async def test_a_renewed_leaf_is_examined_when_the_old_one_expires_and_at_its_own_end(
    stage: Stage,
) -> None:
    renewed = stage.hub.ca.issue(key=stage.node.key, now_ms=NOW_MS + 60_000)
    async with stage.open() as end:
        stage.hub.fleet.offer_identity(NODE_ID, renewed.leaf_pem)
        await end.send("announce", json.loads(renewed.manifest()))
        assert (await end.receive("announce_ack")).payload["ok"]
        for leaf in (stage.node.identity(), renewed.identity()):
            await goes_on(end)
            stage.hub.clock.now_ms = leaf.not_after_ms
            stage.sessions.end_expired()
        assert await end.until_closed() == (4001, [])
