"""What a node that resumes its session is sent again, and what it is not."""

import pytest

from schemas.errors import Failure
from tests.fakes.node_end import BOOT_ID, OTHER_BOOT_ID
from tests.fakes.session_stage import RESULT, STRANGE_ID, Stage, answer, command, dropped, failure, goes_on
from tests.fakes.signer import NOW_MS, OTHER_NODE_ID

pytestmark = pytest.mark.integration

pytestmark = pytest.mark.asyncio(loop_scope="module")


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
