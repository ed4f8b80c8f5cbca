import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from starlette.types import Message
from starlette.websockets import WebSocket
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus
from websockets.typing import Subprotocol

from relay.auth.permissions import Rights
from relay.fleet.node_record import NodeRecord
from relay.routing.port import Command, NodeRef
from relay.sessions.connect_limiter import ConnectLimiter
from relay.sessions.node_sessions import NodeSessions
from schemas.addresses import CONNECT_PATH
from schemas.errors import Failure, ToolError
from schemas.frames import MAX_FRAME_BYTES, MAX_FRAME_BYTES_BEFORE_WELCOME, FrameReader
from schemas.identity import Identity
from schemas.manifest import etag_of
from schemas.registry import SchemaRegistry
from schemas.session import CloseCode
from tests.fakes.asgi_socket import AsgiSocket
from tests.fakes.frames import PAYLOADS, frame_text, message
from tests.fakes.hub import Hub
from tests.fakes.node_end import BOOT_ID, OTHER_BOOT_ID, NodeEnd, device_token
from tests.fakes.serving import Server
from tests.fakes.signer import (
    DAY_MS,
    ECHO,
    NODE_ID,
    NOW_MS,
    OTHER_NODE_ID,
    TENANT,
    SimulatedCa,
    SimulatedNode,
    key_named,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

BOUND_S = 10
NOW_S = NOW_MS // 1000
ECHO_NAME = f"sysecho.{NODE_ID}.echo.invoke"
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
        server.app = Starlette(routes=[WebSocketRoute(CONNECT_PATH, self._serve)])

    async def _serve(self, socket: WebSocket) -> None:
        try:
            await self.sessions.serve(socket)
        finally:
            self._ended.put_nowait(None)

    async def until_ended(self) -> None:
        """Wait until the relay is done with a connection."""
        await asyncio.wait_for(self._ended.get(), BOUND_S)

    def end(self, node: SimulatedNode | None = None) -> AbstractAsyncContextManager[NodeEnd]:
        return NodeEnd.connected(self.address, node or self.node, self._reader)

    @asynccontextmanager
    async def open(self, boot_id: str = BOOT_ID, resume: str | None = None) -> AsyncIterator[NodeEnd]:
        """Hold a connection whose handshake is done."""
        async with self.end() as end:
            await end.authenticate(boot_id, resume=resume)
            yield end

    def run(self, wanted: Command | None = None) -> asyncio.Task[Mapping[str, Any]]:
        return asyncio.create_task(self.sessions.run(wanted or command()))

    def known(self) -> NodeRecord:
        (node,) = self.hub.fleet.nodes_of(TENANT)
        return node

    def sessions_counted(self, event: str) -> float:
        return self.hub.counted("sessions_total", event=event)


@pytest.fixture
def stage(hub: Hub, reader: FrameReader, server: Server) -> Stage:
    return Stage(hub, hub.sessions(), reader, server)


async def answer(task: asyncio.Task[Mapping[str, Any]]) -> Mapping[str, Any]:
    return await asyncio.wait_for(task, BOUND_S)


async def failure(task: asyncio.Task[Mapping[str, Any]]) -> Failure:
    with pytest.raises(ToolError) as caught:
        await answer(task)
    return caught.value.failure


async def goes_on(end: NodeEnd) -> None:
    """Check that the session is as good as before."""
    msg_id = await end.send("heartbeat", PAYLOADS["heartbeat"])
    acknowledged = await end.receive("heartbeat_ack")
    assert acknowledged.in_reply_to == msg_id


# --- the handshake ------------------------------------------------------------------------------------


async def test_a_node_that_answers_the_challenge_is_welcome(stage: Stage) -> None:
    async with stage.end() as end:
        welcome = await end.authenticate()
        assert welcome.payload == {
            "session_id": end.session_id,
            "heartbeat_interval_ms": 60_000,
            "max_frame_bytes": MAX_FRAME_BYTES,
            "server_time_ms": NOW_MS,
            "resumed": False,
        }
        await goes_on(end)
        assert stage.known().connected
        assert stage.sessions_counted("opened") == 1
        assert stage.hub.counted("nodes_connected") == 1


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        pytest.param({"token": {"aud": "https://other.example"}}, "token_audience", id="wrong audience"),
        pytest.param({"token": {"nonce": "x" * 43}}, "token_nonce", id="wrong nonce"),
        pytest.param({"token": {"iat": NOW_S - 60, "exp": NOW_S - 30}}, "token_expired", id="expired token"),
        pytest.param({"token": {"exp": NOW_S + 61}}, "token_life", id="token that lives too long"),
        pytest.param({"token": {"key": key_named("a thief")}}, "token_signature", id="another key"),
        pytest.param({"token": {"sub": OTHER_NODE_ID}}, "token_subject", id="another node's token"),
        pytest.param(
            {"certificate": SimulatedCa().issue(OTHER_NODE_ID).leaf_pem},
            "id_mismatch",
            id="another node's certificate",
        ),
        pytest.param(
            {"certificate": SimulatedCa("elsewhere").issue().leaf_pem}, "chain", id="a foreign root"
        ),
        pytest.param(
            {"certificate": SimulatedCa().issue(now_ms=NOW_MS - 91 * DAY_MS).leaf_pem},
            "validity",
            id="an expired certificate",
        ),
        pytest.param({"certificate": "none"}, "bad_certificate", id="no certificate"),
    ],
)
async def test_a_node_that_does_not_prove_itself_is_closed_with_4001(
    stage: Stage, members: dict[str, Any], reason: str
) -> None:
    async with stage.end() as end:
        await end.answer_challenge(**members)
        assert await end.until_closed() == (4001, [])
        assert stage.sessions_counted(f"refused_{reason}") == 1
        refused = await stage.hub.lines.until("node refused")
        assert refused["reason"] == reason
        assert await failure(stage.run()) is Failure.NODE_OFFLINE


async def test_a_revoked_node_is_closed_with_4003(
    tmp_path: Path, registry: SchemaRegistry, reader: FrameReader, server: Server
) -> None:
    hub = Hub(tmp_path, registry, revoked=[SimulatedCa().issue().kid])
    stage = Stage(hub, hub.sessions(), reader, server)
    async with stage.end() as end:
        await end.answer_challenge()
        code, frames = await end.until_closed()
        assert (code, [frame.payload for frame in frames]) == (4003, [{"reason": "revoked"}])
    hub.close()


async def test_a_node_that_does_not_answer_in_time_is_closed_with_4001(
    hub: Hub, reader: FrameReader, server: Server
) -> None:
    stage = Stage(hub, hub.sessions(auth_timeout_s=0.01), reader, server)
    async with stage.end() as end:
        await end.receive("challenge")
        assert await end.until_closed() == (4001, [])
        assert stage.sessions_counted("refused_late") == 1


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param("", id="nothing"),
        pytest.param("{", id="garbage"),
        pytest.param("[]", id="no object"),
        pytest.param(frame_text("heartbeat"), id="a frame that does not belong here"),
        pytest.param(frame_text("auth", 2, answers=1), id="an answer to another challenge"),
        pytest.param(frame_text("auth", 2) + " " * MAX_FRAME_BYTES_BEFORE_WELCOME, id="over 8 KiB"),
        pytest.param(b"\x00\x01", id="binary"),
    ],
)
async def test_what_is_no_answer_to_the_challenge_is_closed_with_4009(stage: Stage, raw: str | bytes) -> None:
    async with stage.end() as end:
        await end.receive("challenge")
        await end.send_raw(raw)
        assert await end.until_closed() == (4009, [])
        assert stage.sessions_counted("refused_protocol") == 1
        assert stage.hub.fleet.nodes_of(TENANT) == []


@pytest.mark.parametrize("protocols", [None, ["mqtt"], ["edge-kubelet.v2"]])
async def test_without_the_subprotocol_the_upgrade_is_refused(
    stage: Stage, protocols: list[str] | None
) -> None:
    url = f"ws://{stage.address}{CONNECT_PATH}"
    offered = None if protocols is None else [Subprotocol(name) for name in protocols]
    with pytest.raises(InvalidStatus) as caught:
        async with connect(url, subprotocols=offered, proxy=None):
            raise AssertionError
    assert caught.value.response.status_code == 403


async def test_a_node_that_goes_before_it_answers_leaves_nothing(stage: Stage) -> None:
    async with stage.end() as end:
        await end.receive("challenge")
    await stage.until_ended()
    assert stage.sessions_counted("refused_gone") == 1
    assert stage.hub.counted("nodes_connected") == 0


async def test_a_node_that_goes_before_its_welcome_is_not_connected(hub: Hub) -> None:
    sessions = hub.sessions()
    # Accepted, challenged, and then no more.
    socket = AsgiSocket(breaks_at=2)
    serving_it = asyncio.create_task(sessions.serve(socket.websocket))
    async with asyncio.timeout(BOUND_S):
        await admit(socket, hub.ca.issue())
        await serving_it
    assert hub.counted("nodes_connected") == 0
    assert not hub.fleet.nodes_of(TENANT)[0].connected
    with pytest.raises(ToolError) as caught:
        await sessions.run(command())
    assert caught.value.failure is Failure.NODE_OFFLINE


# --- announcing ---------------------------------------------------------------------------------------


async def test_an_accepted_manifest_is_acknowledged_and_its_tools_are_listed(stage: Stage) -> None:
    wire = stage.node.manifest()
    async with stage.open() as end:
        for _ in range(2):
            msg_id = await end.send("announce", json.loads(wire))
            acknowledged = await end.receive("announce_ack")
            assert acknowledged.in_reply_to == msg_id
            assert acknowledged.payload == {"ok": True, "manifest_etag": etag_of(wire)}
        tools = stage.hub.fleet.listed(Rights(TENANT, frozenset({"read_only"})))
        assert ECHO_NAME in [tool.canonical for tool in tools]


THIEF = key_named("a thief")
OTHER_LEAF = SimulatedCa().issue(key=THIEF)
NODE = SimulatedCa().issue()


@pytest.mark.parametrize(
    ("manifest", "code"),
    [
        pytest.param({}, "E_MANIFEST_INVALID", id="empty"),
        pytest.param(json.loads(NODE.manifest(signer=THIEF)), "E_ATTESTATION_FAILED", id="forged"),
        pytest.param(json.loads(OTHER_LEAF.manifest()), "E_ATTESTATION_FAILED", id="unknown leaf"),
        pytest.param(
            json.loads(SimulatedCa().issue(OTHER_NODE_ID).manifest()),
            "E_ATTESTATION_FAILED",
            id="another node's",
        ),
        pytest.param(
            json.loads(NODE.manifest(capabilities=[{**ECHO, "kind": "gpio.led"}])),
            "E_KIND_UNSUPPORTED",
            id="unknown kind",
        ),
        pytest.param(
            json.loads(NODE.manifest(issued_at_ms=NOW_MS - DAY_MS)), "E_MANIFEST_INVALID", id="expired"
        ),
    ],
)
async def test_a_rejected_manifest_is_answered_with_why(
    stage: Stage, manifest: dict[str, Any], code: str
) -> None:
    async with stage.open() as end:
        await end.send("announce", manifest)
        payload = (await end.receive("announce_ack")).payload
        assert payload["ok"] is False
        assert payload["error"]["code"] == code
        assert "mark_issued_at_ms" not in payload
        await goes_on(end)


async def test_a_manifest_older_than_the_newest_is_answered_with_the_mark_to_overtake(stage: Stage) -> None:
    async with stage.open() as end:
        await end.send("announce", json.loads(stage.node.manifest(issued_at_ms=NOW_MS + 5)))
        await end.receive("announce_ack")
        await end.send("announce", json.loads(stage.node.manifest()))
        payload = (await end.receive("announce_ack")).payload
        assert payload["ok"] is False
        assert payload["mark_issued_at_ms"] == NOW_MS + 5


async def test_three_rejected_manifests_in_a_row_close_with_4010(stage: Stage) -> None:
    async with stage.open() as end:
        for _ in range(3):
            await end.send("announce", {})
        code, frames = await end.until_closed()
        assert code == 4010
        assert [frame.type for frame in frames] == ["announce_ack"] * 3 + ["bye"]
        assert frames[-1].payload["reason"] == "manifest_rejected"
    await stage.until_ended()
    assert not stage.known().connected


async def test_an_accepted_manifest_begins_the_count_anew(stage: Stage) -> None:
    bad: dict[str, Any] = {}
    async with stage.open() as end:
        for manifest in (bad, bad, json.loads(stage.node.manifest()), bad, bad):
            await end.send("announce", manifest)
            await end.receive("announce_ack")
        await goes_on(end)


async def test_a_bug_in_serving_a_node_is_not_taken_for_the_end_of_its_connection(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_arguments: object) -> NoReturn:
        raise RuntimeError("planted")

    monkeypatch.setattr(stage.hub.fleet.inventory, "heartbeat", broken)
    async with stage.open() as end:
        await end.send("heartbeat", PAYLOADS["heartbeat"])
        await stage.until_ended()
        await end.until_closed()
    errors = [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert [str(error) for error in errors] == ["planted"]
    assert stage.sessions_counted("closed") == 1


async def test_a_heartbeat_is_answered_with_the_time(stage: Stage) -> None:
    async with stage.open() as end:
        stage.hub.clock.advance(1234)
        await end.send("heartbeat", PAYLOADS["heartbeat"])
        assert (await end.receive("heartbeat_ack")).payload == {"server_time_ms": NOW_MS + 1234}


# --- commands -----------------------------------------------------------------------------------------


async def test_a_command_is_sent_and_its_answer_returned(stage: Stage) -> None:
    async with stage.open() as end:
        task = stage.run()
        frame = await end.receive("cmd")
        assert frame.payload == {
            "tool": ECHO_NAME,
            "arguments": {"message": "ping"},
            "deadline_ms": 10_000,
            "sent_at_ms": NOW_MS,
            "correlation_id": "01HZX9K3M4P7Q8R9S0T1V2W3XW",
        }
        await end.acknowledge(frame, RESULT)
        assert await answer(task) == {"ok": True, "result": RESULT}


async def test_a_nodes_error_is_an_answer_too(stage: Stage) -> None:
    error = {"code": "E_RATE_LIMITED", "message": "Busy.", "suggested_fix": "Wait."}
    async with stage.open() as end:
        task = stage.run()
        frame = await end.receive("cmd")
        await end.send("cmd_ack", {"ok": False, "error": error}, frame.msg_id)
        assert await answer(task) == {"ok": False, "error": error}


async def test_answers_find_their_callers_in_any_order(stage: Stage) -> None:
    async with stage.open() as end:
        tasks = [stage.run(command(message=str(number))) for number in range(3)]
        frames = [await end.receive("cmd") for _ in tasks]
        for frame in reversed(frames):
            await end.acknowledge(frame, {"message": frame.payload["arguments"]["message"]})
        answers = [(await answer(task))["result"]["message"] for task in tasks]
        assert answers == ["0", "1", "2"]


async def test_a_command_to_a_node_that_never_came_fails_at_once(stage: Stage) -> None:
    assert await failure(stage.run(command(30_000))) is Failure.NODE_OFFLINE


async def test_a_command_to_a_node_that_has_gone_fails_at_once(stage: Stage) -> None:
    async with stage.open():
        pass
    await stage.until_ended()
    assert await failure(stage.run(command(30_000))) is Failure.NODE_OFFLINE
    assert not stage.known().connected
    assert stage.hub.counted("nodes_connected") == 0
    assert stage.sessions_counted("closed") == 1


async def test_nothing_is_sent_to_a_node_that_is_not_welcome_yet(stage: Stage) -> None:
    async with stage.end() as end:
        await end.receive("challenge")
        assert await failure(stage.run()) is Failure.NODE_OFFLINE


async def test_without_an_answer_the_deadline_ends_the_call_and_the_node_is_told(stage: Stage) -> None:
    async with stage.open() as end:
        task = stage.run(command(deadline_ms=20))
        frame = await end.receive("cmd")
        assert await failure(task) is Failure.DEADLINE_EXCEEDED
        cancelled = await end.receive("cmd_cancel")
        assert (cancelled.in_reply_to, cancelled.payload) == (frame.msg_id, {"reason": "deadline"})


async def test_when_the_caller_goes_the_node_is_told(stage: Stage) -> None:
    async with stage.open() as end:
        task = stage.run()
        frame = await end.receive("cmd")
        task.cancel()
        cancelled = await end.receive("cmd_cancel")
        assert (cancelled.in_reply_to, cancelled.payload) == (frame.msg_id, {"reason": "caller_gone"})
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_connection_that_is_lost_after_sending_is_no_node_that_is_offline(stage: Stage) -> None:
    async with stage.open() as end:
        task = stage.run(command(deadline_ms=200))
        await end.receive("cmd")
    assert await failure(task) is Failure.DEADLINE_EXCEEDED


async def test_a_command_that_does_not_fit_a_frame_fails_and_costs_the_session_nothing(stage: Stage) -> None:
    async with stage.open() as end:
        assert await failure(stage.run(command(message="x" * MAX_FRAME_BYTES))) is Failure.INTERNAL
        await goes_on(end)


# --- unexpected answers -------------------------------------------------------------------------------


async def dropped(stage: Stage, reason: str, count: int = 1) -> None:
    line = await stage.hub.lines.until("frame dropped")
    assert (line["reason"], line["node_id"]) == (reason, NODE_ID)
    assert stage.hub.counted("frames_dropped_total", reason=reason) == count
    stage.hub.refusals.write()
    assert stage.hub.audited()[-1] == {
        "ts_ms": NOW_MS,
        "event": "frame_dropped",
        "source": NODE_ID,
        "reason": reason,
        "count": count,
    }


async def test_a_late_answer_is_dropped_and_stands_in_the_audit(stage: Stage) -> None:
    async with stage.open() as end:
        task = stage.run(command(deadline_ms=20))
        frame = await end.receive("cmd")
        assert await failure(task) is Failure.DEADLINE_EXCEEDED
        await end.receive("cmd_cancel")
        await end.acknowledge(frame, RESULT)
        await dropped(stage, "unasked")
        await goes_on(end)


async def test_of_two_answers_the_first_counts_and_the_second_is_dropped(stage: Stage) -> None:
    async with stage.open() as end:
        task = stage.run()
        frame = await end.receive("cmd")
        await end.acknowledge(frame, RESULT)
        await end.acknowledge(frame, {"message": "another"})
        assert await answer(task) == {"ok": True, "result": RESULT}
        await dropped(stage, "unasked")
        await goes_on(end)


async def test_an_answer_to_nothing_is_dropped_and_the_caller_waits_on(stage: Stage) -> None:
    async with stage.open() as end:
        task = stage.run()
        frame = await end.receive("cmd")
        await end.send("cmd_ack", {"ok": True, "result": {}}, STRANGE_ID)
        await dropped(stage, "unasked")
        await end.acknowledge(frame, RESULT)
        assert await answer(task) == {"ok": True, "result": RESULT}


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param({}, id="empty"),
        pytest.param({"ok": True}, id="no result"),
        pytest.param({"ok": True, "result": "text"}, id="a text for a result"),
        pytest.param({"ok": True, "result": {}, "error": {}}, id="both"),
        pytest.param({"ok": False, "error": {"code": "E_NEW"}}, id="an unknown code"),
    ],
)
async def test_a_malformed_answer_is_dropped_and_a_good_one_still_counts(
    stage: Stage, payload: dict[str, Any]
) -> None:
    async with stage.open() as end:
        task = stage.run()
        frame = await end.receive("cmd")
        raw = {"type": "cmd_ack", "msg_id": STRANGE_ID, "in_reply_to": frame.msg_id, "payload": payload}
        await end.send_raw(json.dumps(raw))
        await dropped(stage, "malformed")
        await end.acknowledge(frame, RESULT)
        assert await answer(task) == {"ok": True, "result": RESULT}


async def test_one_node_cannot_answer_for_another(stage: Stage) -> None:
    other = stage.hub.ca.issue(OTHER_NODE_ID)
    async with stage.open() as end, stage.end(other) as thief:
        await thief.authenticate()
        task = stage.run()
        frame = await end.receive("cmd")
        await thief.acknowledge(frame, {"message": "stolen"})
        line = await stage.hub.lines.until("frame dropped")
        assert (line["reason"], line["node_id"]) == ("unasked", OTHER_NODE_ID)
        await end.acknowledge(frame, RESULT)
        assert await answer(task) == {"ok": True, "result": RESULT}


# --- one session a node -------------------------------------------------------------------------------


async def test_a_node_with_a_newer_session_at_another_relay_is_let_go(stage: Stage) -> None:
    async with stage.open() as end:
        sent = stage.run(command(deadline_ms=200))
        await end.receive("cmd")
        stage.sessions.let_go(NODE_ID)
        # Nothing more is sent to it, and what was sent is not known to have run or not.
        assert await failure(stage.run()) is Failure.NODE_OFFLINE
        code, frames = await end.until_closed()
        assert (code, [frame.type for frame in frames]) == (4008, ["bye"])
        assert await failure(sent) is Failure.DEADLINE_EXCEEDED
    assert not stage.known().connected
    assert stage.sessions_counted("superseded_elsewhere") == 1
    stage.sessions.let_go(NODE_ID)  # it has no connection any more
    assert stage.sessions_counted("superseded_elsewhere") == 1


async def test_what_follows_the_loss_of_a_node_may_show_it_as_connected_elsewhere(stage: Stage) -> None:
    def elsewhere(node: NodeRef, connected: bool) -> None:  # noqa: FBT001 - a ConnectionHandler
        if not connected:
            stage.hub.fleet.set_connected(node.node_id, connected=True)

    stage.hub.one_way.on_connection(elsewhere)
    async with stage.open():
        stage.sessions.let_go(NODE_ID)
        assert stage.known().connected


async def test_the_newer_process_replaces_the_older_and_a_duplicate_identity_is_flagged(stage: Stage) -> None:
    async with stage.open() as older, stage.open(OTHER_BOOT_ID) as newer:
        code, frames = await older.until_closed()
        assert code == 4008
        assert [(frame.type, frame.payload["reason"]) for frame in frames] == [("bye", "superseded")]
        assert stage.sessions_counted("duplicate_identity") == 1
        flagged = stage.hub.lines.entries("two machines use one identity; the newer stays")
        assert [line["node_id"] for line in flagged] == [NODE_ID]
        await stage.until_ended()
        assert stage.known().connected
        assert stage.hub.counted("nodes_connected") == 1
        task = stage.run()
        await newer.acknowledge(await newer.receive("cmd"), RESULT)
        assert await answer(task) == {"ok": True, "result": RESULT}


async def test_a_process_that_comes_again_supersedes_itself_without_an_alarm(stage: Stage) -> None:
    async with stage.open() as older, stage.open() as newer:
        assert (await older.until_closed())[0] == 4008
        assert older.session_id != newer.session_id
        assert stage.sessions_counted("duplicate_identity") == 0
        await goes_on(newer)


async def test_a_machine_that_comes_after_another_has_gone_is_no_duplicate(stage: Stage) -> None:
    async with stage.open():
        pass
    await stage.until_ended()
    async with stage.open(OTHER_BOOT_ID) as end:
        await goes_on(end)
        assert stage.sessions_counted("duplicate_identity") == 0
        assert stage.hub.counted("nodes_connected") == 1


async def test_another_node_supersedes_no_session(stage: Stage) -> None:
    other = stage.hub.ca.issue(OTHER_NODE_ID)
    async with stage.open() as one, stage.end(other) as two:
        await two.authenticate()
        await goes_on(one)
        await goes_on(two)
        assert stage.hub.counted("nodes_connected") == 2


# --- resuming -----------------------------------------------------------------------------------------


async def test_the_process_that_resumes_gets_what_it_has_not_answered_under_the_same_id(
    stage: Stage,
) -> None:
    async with stage.open() as end:
        task = stage.run()
        first = await end.receive("cmd")
    await stage.until_ended()
    stage.hub.clock.advance(400)
    async with stage.end() as again:
        welcome = await again.authenticate(BOOT_ID, resume=end.session_id)
        assert (welcome.payload["resumed"], welcome.payload["session_id"]) == (True, end.session_id)
        second = await again.receive("cmd")
        assert second.msg_id == first.msg_id
        assert second.payload == {**first.payload, "deadline_ms": 9600, "sent_at_ms": NOW_MS + 400}
        await again.acknowledge(second, RESULT)
        assert await answer(task) == {"ok": True, "result": RESULT}
        assert stage.sessions_counted("resumed") == 1


async def test_a_resumed_command_is_answered_once(stage: Stage) -> None:
    async with stage.open() as end:
        task = stage.run()
        await end.receive("cmd")
    await stage.until_ended()
    async with stage.open(resume=end.session_id) as again:
        frame = await again.receive("cmd")
        await again.acknowledge(frame, RESULT)
        await again.acknowledge(frame, RESULT)
        assert await answer(task) == {"ok": True, "result": RESULT}
        await dropped(stage, "unasked")


async def test_what_was_answered_is_not_sent_again(stage: Stage) -> None:
    async with stage.open() as end:
        task = stage.run()
        await end.acknowledge(await end.receive("cmd"), RESULT)
        await answer(task)
    await stage.until_ended()
    async with stage.open(resume=end.session_id) as again:
        await goes_on(again)


async def test_what_is_past_its_deadline_is_not_sent_again(stage: Stage) -> None:
    async with stage.open() as end:
        task = stage.run()
        await end.receive("cmd")
    await stage.until_ended()
    stage.hub.clock.advance(10_000)
    async with stage.open(resume=end.session_id) as again:
        await goes_on(again)
    task.cancel()


@pytest.mark.parametrize(
    ("boot_id", "resumes"),
    [
        pytest.param(OTHER_BOOT_ID, True, id="another process with the session's id"),
        pytest.param(BOOT_ID, False, id="the process without asking"),
    ],
)
async def test_what_was_sent_goes_to_no_other_session_and_the_caller_waits_until_the_deadline(
    stage: Stage, boot_id: str, *, resumes: bool
) -> None:
    async with stage.open() as end:
        task = stage.run(command(deadline_ms=200))
        await end.receive("cmd")
    await stage.until_ended()
    async with stage.end() as other:
        welcome = await other.authenticate(boot_id, resume=end.session_id if resumes else None)
        assert welcome.payload["resumed"] is False
        assert welcome.payload["session_id"] != end.session_id
        await goes_on(other)
        assert await failure(task) is Failure.DEADLINE_EXCEEDED
        await goes_on(other)


async def test_a_session_that_the_relay_does_not_know_is_not_resumed_and_a_new_one_begins(
    stage: Stage,
) -> None:
    async with stage.open() as end:
        task = stage.run(command(deadline_ms=200))
        await end.receive("cmd")
    await stage.until_ended()
    async with stage.end() as again:
        welcome = await again.authenticate(BOOT_ID, resume=STRANGE_ID)
        assert welcome.payload["resumed"] is False
        assert welcome.payload["session_id"] not in {STRANGE_ID, end.session_id}
        await goes_on(again)
        assert await failure(task) is Failure.DEADLINE_EXCEEDED


async def test_a_superseded_process_that_comes_back_is_not_sent_again_what_it_had(stage: Stage) -> None:
    async with stage.open() as end:
        task = stage.run()
        first = await end.receive("cmd")
        async with stage.open(OTHER_BOOT_ID) as newer:
            assert (await end.until_closed())[0] == 4008
            await goes_on(newer)
            await newer.send("cmd_ack", {"ok": True, "result": RESULT}, first.msg_id)
            await dropped(stage, "unasked")
    async with stage.end() as again:
        welcome = await again.authenticate(BOOT_ID, resume=end.session_id)
        assert welcome.payload["resumed"] is False
        await again.send("cmd_ack", {"ok": True, "result": RESULT}, first.msg_id)
        await goes_on(again)
        assert not task.done()
    task.cancel()


async def test_an_answer_over_a_resumed_connection_that_is_too_late_is_dropped_and_counted(
    stage: Stage,
) -> None:
    async with stage.open() as end:
        task = stage.run(command(deadline_ms=200))
        frame = await end.receive("cmd")
    await stage.until_ended()
    assert await failure(task) is Failure.DEADLINE_EXCEEDED
    async with stage.open(resume=end.session_id) as again:
        await again.acknowledge(frame, RESULT)
        await dropped(stage, "unasked")
        await goes_on(again)


async def test_a_session_that_is_not_ones_own_cannot_be_resumed(stage: Stage) -> None:
    async with stage.open() as end:
        task = stage.run()
        frame = await end.receive("cmd")
        async with stage.end(stage.hub.ca.issue(OTHER_NODE_ID)) as thief:
            welcome = await thief.authenticate(BOOT_ID, resume=end.session_id)
            assert welcome.payload["resumed"] is False
            await goes_on(thief)
        await end.acknowledge(frame, RESULT)
        assert await answer(task) == {"ok": True, "result": RESULT}


async def test_a_connection_that_hangs_is_replaced_by_the_one_that_resumes(stage: Stage) -> None:
    async with stage.open() as hanging:
        task = stage.run()
        first = await hanging.receive("cmd")
        async with stage.open(resume=hanging.session_id) as again:
            second = await again.receive("cmd")
            assert second.msg_id == first.msg_id
            assert (await hanging.until_closed())[0] == 4008
            await stage.until_ended()
            await again.acknowledge(second, RESULT)
            assert await answer(task) == {"ok": True, "result": RESULT}
            assert stage.known().connected


# --- breaking the protocol, and ending ----------------------------------------------------------------


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


# --- who is sent away, and who is shut out ------------------------------------------------------------


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
        socket = AsgiSocket(address=address)
        serving_it = asyncio.create_task(sessions.serve(socket.websocket))
        socket.put({"type": "websocket.disconnect", "code": 1006})
        await asyncio.wait_for(serving_it, BOUND_S)
        last.append(json.loads(socket.sent[1]["text"])["type"])
    assert last == ["challenge", "bye", "challenge"]


def is_any_node(_leaf: Identity) -> bool:
    return True


async def test_a_frame_on_its_way_when_the_relay_closes_breaks_no_protocol(hub: Hub) -> None:
    sessions, socket = hub.sessions(), AsgiSocket()
    serving_it = asyncio.create_task(sessions.serve(socket.websocket))
    async with asyncio.timeout(BOUND_S):
        await admit(socket, hub.ca.issue())
        while len(socket.sent) < 3:  # noqa: ASYNC110 - the event is in the application under test
            await asyncio.sleep(0)
        sessions.end_sessions(is_any_node, CloseCode.REVOKED)
        while socket.sent[-1]["type"] != "websocket.close":  # noqa: ASYNC110 - as above
            await asyncio.sleep(0)
        socket.put_text(frame_text("heartbeat"))
        socket.put({"type": "websocket.disconnect", "code": 4003})
        await serving_it
    assert hub.counted("sessions_total", event="protocol_violation") == 0
    assert not hub.audit_file.read_text()


async def test_who_is_shut_out_is_closed_and_its_calls_end(stage: Stage) -> None:
    async with stage.open() as end:
        task = stage.run()
        await end.receive("cmd")
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
        task = stage.run()
        await end.receive("cmd")
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


async def admit(socket: AsgiSocket, node: SimulatedNode) -> None:
    """Go through the handshake as ``node``, up to its answer, on a connection without a server."""
    while len(socket.sent) < 2:  # noqa: ASYNC110 - the event is in the application under test
        await asyncio.sleep(0)
    challenge = json.loads(socket.sent[-1]["text"])
    auth = message("auth", 2, node_id=NODE_ID, certificate=node.leaf_pem)
    auth["payload"]["token"] = device_token(node, challenge["payload"])
    socket.put_text(json.dumps(auth | {"in_reply_to": challenge["msg_id"]}))


async def test_a_command_on_a_connection_that_breaks_under_it_is_waited_for_until_its_deadline(
    hub: Hub,
) -> None:
    node, sessions, socket = hub.ca.issue(), hub.sessions(), AsgiSocket()
    serving_it = asyncio.create_task(sessions.serve(socket.websocket))
    async with asyncio.timeout(BOUND_S):
        await admit(socket, node)
        while len(socket.sent) < 3:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0)
        socket.breaks_at = 0  # whatever is sent from now on
        # It may have arrived in part, and the same process may come back for it: not offline.
        assert (
            await failure(asyncio.create_task(sessions.run(command(deadline_ms=20))))
            is Failure.DEADLINE_EXCEEDED
        )
        socket.put({"type": "websocket.disconnect", "code": 1006})
        await serving_it
    assert hub.counted("nodes_connected") == 0


async def test_a_command_to_a_node_that_does_not_read_ends_at_its_deadline(hub: Hub) -> None:
    node, sessions, socket = hub.ca.issue(), hub.sessions(), StoppedSocket("cmd")
    serving_it = asyncio.create_task(sessions.serve(socket.websocket))
    async with asyncio.timeout(BOUND_S):
        await admit(socket, node)
        while len(socket.sent) < 3:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0)
        task = asyncio.create_task(sessions.run(command(deadline_ms=20)))
        await socket.stopped.wait()
        assert await failure(task) is Failure.DEADLINE_EXCEEDED
        socket.put({"type": "websocket.disconnect", "code": 1006})
        await serving_it


class StoppedSocket(AsgiSocket):
    """A connection whose other end stops reading with one type of frame, until the test lets it go on."""

    def __init__(self, type_: str = "welcome") -> None:
        super().__init__()
        self._type = f'"type":"{type_}"'
        self.stopped = asyncio.Event()
        self.goes_on = asyncio.Event()

    async def _send(self, message: Message) -> None:
        if self._type in message.get("text", ""):
            self.stopped.set()
            await self.goes_on.wait()
        await super()._send(message)


async def test_who_is_shut_out_while_the_welcome_is_on_its_way_is_not_connected_afterwards(hub: Hub) -> None:
    node, sessions, socket = hub.ca.issue(), hub.sessions(), StoppedSocket()
    serving_it = asyncio.create_task(sessions.serve(socket.websocket))
    async with asyncio.timeout(BOUND_S):
        await admit(socket, node)
        await socket.stopped.wait()
        assert sessions.end_sessions(is_any_node, CloseCode.REVOKED) == [NODE_ID]
        socket.goes_on.set()
        socket.put({"type": "websocket.disconnect", "code": 4003})
        await serving_it
    assert not hub.fleet.nodes_of(TENANT)[0].connected
    assert hub.counted("nodes_connected") == 0


async def test_a_command_that_is_sent_while_the_welcome_waits_is_sent_once(hub: Hub) -> None:
    # A second copy would run if the node had refused the first: its caller was told that it did not run.
    node, sessions, socket = hub.ca.issue(), hub.sessions(), StoppedSocket()
    serving_it = asyncio.create_task(sessions.serve(socket.websocket))
    async with asyncio.timeout(BOUND_S):
        await admit(socket, node)
        await socket.stopped.wait()
        task = asyncio.create_task(sessions.run(command()))
        while '"type":"cmd"' not in socket.sent[-1].get("text", ""):  # noqa: ASYNC110 - as above
            await asyncio.sleep(0)
        socket.goes_on.set()
        socket.put_text(frame_text("heartbeat", 9))
        while '"type":"heartbeat_ack"' not in socket.sent[-1].get("text", ""):  # noqa: ASYNC110 - as above
            await asyncio.sleep(0)
        assert len([sent for sent in socket.sent if '"type":"cmd"' in sent.get("text", "")]) == 1
        task.cancel()
        socket.put({"type": "websocket.disconnect", "code": 1006})
        await serving_it


async def test_the_sessions_are_an_application_by_themselves(hub: Hub) -> None:
    socket = AsgiSocket()
    websocket = socket.websocket
    scope = {**websocket.scope, "subprotocols": []}
    await hub.sessions()(scope, websocket.receive, websocket.send)
    assert [sent["type"] for sent in socket.sent] == ["websocket.close"]


async def test_a_command_that_does_not_fit_a_frame_is_not_sent_and_the_session_goes_on(stage: Stage) -> None:
    async with stage.open() as end:
        assert await failure(stage.run(command(message="x" * MAX_FRAME_BYTES))) is Failure.INTERNAL
        await goes_on(end)


async def test_machines_that_take_an_identity_from_each_other_fill_no_log(stage: Stage) -> None:
    async with stage.open() as first, stage.open(OTHER_BOOT_ID) as second:
        assert (await first.until_closed())[0] == 4008
        async with stage.open() as third:
            assert (await second.until_closed())[0] == 4008
            await goes_on(third)
    assert stage.sessions_counted("duplicate_identity") == 2
    assert len(stage.hub.lines.entries("two machines use one identity; the newer stays")) == 1
