"""The sessions of nodes: announcing, commands and answers, one session for each node, and its resumption."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any, NoReturn

import pytest

from relay.auth.permissions import Rights
from relay.fleet.node_record import Where
from relay.routing.port import NodeRef
from schemas.errors import Failure
from schemas.frames import MAX_FRAME_BYTES, SUBPROTOCOL, SUBPROTOCOL_1_1, SUBPROTOCOLS
from schemas.manifest import etag_of
from tests.fakes.frames import PAYLOADS
from tests.fakes.node_end import BOOT_ID, OTHER_BOOT_ID
from tests.fakes.session_stage import (
    RESULT,
    STRANGE_ID,
    Stage,
    answer,
    command,
    dropped,
    failure,
    goes_on,
    succeeds,
)
from tests.fakes.signer import DAY_MS, ECHO, NODE_ID, NOW_MS, OTHER_NODE_ID, TENANT, SimulatedCa, key_named

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.integration]
ECHO_NAME = f"sysecho.{NODE_ID}.echo.invoke"
HANDLER_MS = 50
HASTY = {**ECHO, "constraints": {**ECHO["constraints"], "deadline_ms_default": HANDLER_MS}}


async def test_an_accepted_manifest_is_acknowledged_and_its_tools_are_listed(stage: Stage) -> None:
    wire = stage.node.manifest()
    async with stage.open() as end:
        for _ in range(2):
            msg_id = await end.send("announce", json.loads(wire))
            acknowledged = await end.receive("announce_ack")
            assert acknowledged.in_reply_to == msg_id
            assert acknowledged.payload == {"ok": True, "manifest_etag": etag_of(wire)}
        tools = stage.hub.fleet.selected.listed(Rights(TENANT, frozenset({"read_only"})))
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


async def test_a_command_is_sent_and_its_answer_returned(stage: Stage) -> None:
    async with stage.open() as end:
        task, frame = await stage.sent(end)
        assert frame.payload == {
            "tool": ECHO_NAME,
            "arguments": {"message": "ping"},
            "deadline_ms": 10_000,
            "sent_at_ms": NOW_MS,
            "correlation_id": "01HZX9K3M4P7Q8R9S0T1V2W3XW",
        }
        await succeeds(end, frame, task)


async def test_a_nodes_error_is_an_answer_too(stage: Stage) -> None:
    error = {"code": "E_RATE_LIMITED", "message": "Busy.", "suggested_fix": "Wait."}
    async with stage.open() as end:
        task, frame = await stage.sent(end)
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


@pytest.mark.holds("RFC-0005/7/deadline")
async def test_without_an_answer_the_deadline_ends_the_call_and_the_node_is_told(stage: Stage) -> None:
    async with stage.open() as end:
        task, frame = await stage.sent(end, command(deadline_ms=20))
        assert await failure(task) is Failure.DEADLINE_EXCEEDED
        cancelled = await end.receive("cmd_cancel")
        assert (cancelled.in_reply_to, cancelled.payload) == (frame.msg_id, {"reason": "deadline"})


@pytest.mark.holds("RFC-0005/7/handler")
@pytest.mark.parametrize(
    ("subprotocols", "deadline_ms"),
    [
        pytest.param(SUBPROTOCOLS, 10_000, id="1.2"),
        pytest.param((SUBPROTOCOL_1_1, SUBPROTOCOL), HANDLER_MS, id="1.1"),
        pytest.param((SUBPROTOCOL,), HANDLER_MS, id="1"),
    ],
)
async def test_a_node_before_1_2_gets_no_more_time_than_its_handler_has(
    stage: Stage, subprotocols: Sequence[str], deadline_ms: int
) -> None:
    stage.hub.announce(stage.node, capabilities=[HASTY])
    async with stage.open(subprotocols=subprotocols) as end:
        task, frame = await stage.sent(end)
        assert frame.payload["deadline_ms"] == deadline_ms
        await end.acknowledge(frame, RESULT)
        await answer(task)
        shorter = stage.run(command(deadline_ms=30))
        assert (await end.receive("cmd")).payload["deadline_ms"] == 30
        assert await failure(shorter) is Failure.DEADLINE_EXCEEDED


async def test_an_answer_counts_that_comes_later_than_its_handler_may_end(stage: Stage) -> None:
    stage.hub.announce(stage.node, capabilities=[HASTY])
    async with stage.open(subprotocols=SUBPROTOCOLS) as end:
        task, frame = await stage.sent(end)
        later = stage.run(command(deadline_ms=2 * HANDLER_MS))
        assert await failure(later) is Failure.DEADLINE_EXCEEDED
        await succeeds(end, frame, task)


async def test_when_the_caller_goes_the_node_is_told(stage: Stage) -> None:
    async with stage.open() as end:
        task, frame = await stage.sent(end)
        task.cancel()
        cancelled = await end.receive("cmd_cancel")
        assert (cancelled.in_reply_to, cancelled.payload) == (frame.msg_id, {"reason": "caller_gone"})
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_connection_that_is_lost_after_sending_is_no_node_that_is_offline(stage: Stage) -> None:
    async with stage.open() as end:
        task, _ = await stage.sent(end, command(deadline_ms=200))
    assert await failure(task) is Failure.DEADLINE_EXCEEDED


async def test_a_command_that_does_not_fit_a_frame_fails_and_costs_the_session_nothing(stage: Stage) -> None:
    async with stage.open() as end:
        assert await failure(stage.run(command(message="x" * MAX_FRAME_BYTES))) is Failure.INTERNAL
        await goes_on(end)


async def test_a_node_with_a_newer_session_at_another_relay_is_ended(stage: Stage) -> None:
    async with stage.open() as end:
        sent, _ = await stage.sent(end, command(deadline_ms=200))
        stage.sessions.end_superseded(NODE_ID, "another relay")
        # Nothing more is sent to it, and what was sent is not known to have run or not.
        assert await failure(stage.run()) is Failure.NODE_OFFLINE
        code, frames = await end.until_closed()
        assert (code, [frame.type for frame in frames]) == (4008, ["bye"])
        assert await failure(sent) is Failure.DEADLINE_EXCEEDED
    assert not stage.known().connected
    assert stage.sessions_counted("superseded_elsewhere") == 1
    stage.sessions.end_superseded(NODE_ID, "another relay")  # it has no connection any more
    assert stage.sessions_counted("superseded_elsewhere") == 1


async def test_what_follows_the_loss_of_a_node_may_show_it_as_connected_elsewhere(stage: Stage) -> None:
    def elsewhere(node: NodeRef, connected: bool) -> None:  # noqa: FBT001 - a ConnectionHandler
        if not connected:
            stage.hub.fleet.connection_changed(node.node_id, Where.HERE)

    stage.hub.one_way.on_connection(elsewhere)
    async with stage.open():
        stage.sessions.end_superseded(NODE_ID, "another relay")
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


@pytest.mark.holds("RFC-0005/7/late-ack")
async def test_a_late_answer_is_dropped_and_stands_in_the_audit(stage: Stage) -> None:
    async with stage.open() as end:
        task, frame = await stage.sent(end, command(deadline_ms=20))
        assert await failure(task) is Failure.DEADLINE_EXCEEDED
        await end.receive("cmd_cancel")
        await end.acknowledge(frame, RESULT)
        await dropped(stage, "unasked")
        await goes_on(end)


async def test_of_two_answers_the_first_counts_and_the_second_is_dropped(stage: Stage) -> None:
    async with stage.open() as end:
        task, frame = await stage.sent(end)
        await end.acknowledge(frame, RESULT)
        await end.acknowledge(frame, {"message": "another"})
        assert await answer(task) == {"ok": True, "result": RESULT}
        await dropped(stage, "unasked")
        await goes_on(end)


async def test_an_answer_to_nothing_is_dropped_and_the_caller_waits_on(stage: Stage) -> None:
    async with stage.open() as end:
        task, frame = await stage.sent(end)
        await end.send("cmd_ack", {"ok": True, "result": {}}, STRANGE_ID)
        await dropped(stage, "unasked")
        await succeeds(end, frame, task)


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
        task, frame = await stage.sent(end)
        raw = {"type": "cmd_ack", "msg_id": STRANGE_ID, "in_reply_to": frame.msg_id, "payload": payload}
        await end.send_raw(json.dumps(raw))
        await dropped(stage, "malformed")
        await succeeds(end, frame, task)


async def test_one_node_cannot_answer_for_another(stage: Stage) -> None:
    other = stage.hub.ca.issue(OTHER_NODE_ID)
    async with stage.open() as end, stage.end(other) as thief:
        await thief.authenticate()
        task, frame = await stage.sent(end)
        await thief.acknowledge(frame, {"message": "stolen"})
        line = await stage.hub.lines.until("frame dropped")
        assert (line["reason"], line["node_id"]) == ("unasked", OTHER_NODE_ID)
        await succeeds(end, frame, task)


@pytest.mark.holds("RFC-0005/6.4/fresh-msg-id")
async def test_the_process_that_resumes_gets_what_it_has_not_answered_under_the_same_id(
    stage: Stage,
) -> None:
    async with stage.open() as end:
        task, first = await stage.sent(end)
    await stage.until_ended()
    stage.hub.clock.advance(400)
    async with stage.end() as again:
        welcome = await again.authenticate(BOOT_ID, resume=end.session_id)
        assert (welcome.payload["resumed"], welcome.payload["session_id"]) == (True, end.session_id)
        second = await again.receive("cmd")
        assert second.msg_id == first.msg_id
        assert second.payload == {**first.payload, "deadline_ms": 9600, "sent_at_ms": NOW_MS + 400}
        await succeeds(again, second, task)
        assert stage.sessions_counted("resumed") == 1
        another, fresh = await stage.sent(again)
        assert fresh.msg_id > first.msg_id
        await succeeds(again, fresh, another)


async def test_a_resumed_command_is_answered_once(stage: Stage) -> None:
    async with stage.open() as end:
        task, _ = await stage.sent(end)
    await stage.until_ended()
    async with stage.open(resume=end.session_id) as again:
        frame = await again.receive("cmd")
        await again.acknowledge(frame, RESULT)
        await succeeds(again, frame, task)
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
        task, _ = await stage.sent(end)
    await stage.until_ended()
    stage.hub.clock.advance(10_000)
    async with stage.open(resume=end.session_id) as again:
        await goes_on(again)
    task.cancel()


@pytest.mark.holds("RFC-0005/12/no-auto-retry")
@pytest.mark.parametrize(
    ("boot_id", "resume"),
    [
        pytest.param(OTHER_BOOT_ID, "its own", id="another process with the session's id"),
        pytest.param(BOOT_ID, None, id="the process without asking"),
        pytest.param(BOOT_ID, STRANGE_ID, id="the process with an id that the relay does not know"),
    ],
)
async def test_what_was_sent_goes_to_no_other_session_and_the_caller_waits_until_the_deadline(
    stage: Stage, boot_id: str, resume: str | None
) -> None:
    async with stage.open() as end:
        task, _ = await stage.sent(end, command(deadline_ms=200))
    await stage.until_ended()
    async with stage.end() as other:
        named = end.session_id if resume == "its own" else resume
        welcome = await other.authenticate(boot_id, resume=named)
        assert welcome.payload["resumed"] is False
        assert welcome.payload["session_id"] not in {named, end.session_id}
        await goes_on(other)
        assert await failure(task) is Failure.DEADLINE_EXCEEDED
        await goes_on(other)


async def test_a_superseded_process_that_comes_back_is_not_sent_again_what_it_had(stage: Stage) -> None:
    async with stage.open() as end:
        task, first = await stage.sent(end)
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
        task, frame = await stage.sent(end, command(deadline_ms=200))
    await stage.until_ended()
    assert await failure(task) is Failure.DEADLINE_EXCEEDED
    async with stage.open(resume=end.session_id) as again:
        await again.acknowledge(frame, RESULT)
        await dropped(stage, "unasked")
        await goes_on(again)


async def test_a_session_that_is_not_ones_own_cannot_be_resumed(stage: Stage) -> None:
    async with stage.open() as end:
        task, frame = await stage.sent(end)
        async with stage.end(stage.hub.ca.issue(OTHER_NODE_ID)) as thief:
            welcome = await thief.authenticate(BOOT_ID, resume=end.session_id)
            assert welcome.payload["resumed"] is False
            await goes_on(thief)
        await succeeds(end, frame, task)


async def test_a_connection_that_hangs_is_replaced_by_the_one_that_resumes(stage: Stage) -> None:
    async with stage.open() as hanging:
        task, first = await stage.sent(hanging)
        async with stage.open(resume=hanging.session_id) as again:
            second = await again.receive("cmd")
            assert second.msg_id == first.msg_id
            assert (await hanging.until_closed())[0] == 4008
            await stage.until_ended()
            await succeeds(again, second, task)
            assert stage.known().connected
