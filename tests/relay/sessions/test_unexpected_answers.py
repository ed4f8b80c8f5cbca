"""Answers that nothing waits for, that come twice, or that are malformed: dropped, counted and audited."""

import json
from typing import Any

import pytest

from schemas.errors import Failure
from tests.fakes.session_stage import RESULT, STRANGE_ID, Stage, answer, command, dropped, failure, goes_on
from tests.fakes.signer import OTHER_NODE_ID

pytestmark = pytest.mark.integration

pytestmark = pytest.mark.asyncio(loop_scope="module")


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
