import asyncio

import pytest

from relay.routing.answer import CommandAnswer
from relay.routing.port import Command
from relay.sessions.commands import cmd_payload
from relay.sessions.session import NodeSession
from relay.settings.environment import SessionClock
from schemas.errors import Failure, ToolError
from schemas.payloads import CmdAck
from schemas.registry import SchemaRegistry
from tests.fakes.frames import COMMAND
from tests.fakes.signer import NODE_ID, NOW_MS, SimulatedCa

DONE: CmdAck = {"ok": True, "result": {}}
AGAIN: CmdAck = {"ok": True, "result": {"again": 1}}
REVOKED = ToolError(Failure.ATTESTATION_FAILED)


@pytest.fixture
def live() -> NodeSession:
    return NodeSession(
        "session-1", "boot-1", SimulatedCa().issue().identity(), None, SessionClock(NOW_MS, lambda: 0)
    )


def sent(live: NodeSession, msg_id: str) -> CommandAnswer:
    """Return what waits for the answer to a command that was sent as ``msg_id``."""
    waiter = CommandAnswer(asyncio.get_running_loop())
    live.pending.add(msg_id, COMMAND, NOW_MS + 1000, waiter)
    return waiter


async def test_an_answer_goes_to_who_asked_for_it_once(live: NodeSession) -> None:
    first, second = sent(live, "1"), sent(live, "2")
    live.settle("1", DONE)
    live.settle("1", AGAIN)
    assert first.result() is DONE
    assert not second.done()
    assert len(live.pending) == 1


async def test_an_answer_without_a_waiting_caller_is_dropped(live: NodeSession) -> None:
    live.settle("1", DONE)
    given_up = sent(live, "2")
    given_up.cancel()
    live.settle("2", DONE)
    assert given_up.cancelled()
    assert len(live.pending) == 0


async def test_a_deadline_ends_what_has_no_answer(live: NodeSession) -> None:
    answered, late = sent(live, "1"), sent(live, "2")
    live.settle("1", DONE)
    for waiter in (answered, late):
        waiter.expire()
    assert answered.result() is DONE
    error = late.exception()
    assert isinstance(error, ToolError)
    assert error.failure is Failure.DEADLINE_EXCEEDED
    live.settle("2", DONE)
    assert late.exception() is error


async def test_all_that_is_not_answered_ends_with_the_same_error(live: NodeSession) -> None:
    answered, given_up, *waiting = (sent(live, str(number)) for number in range(5))
    live.settle("0", DONE)
    given_up.cancel()
    live.fail_all(REVOKED)
    assert answered.result() is DONE
    assert given_up.cancelled()
    assert [waiter.exception() for waiter in waiting] == [REVOKED] * 3
    assert len(live.pending) == 0


async def test_what_has_ended_is_not_ended_again_by_a_late_answer(live: NodeSession) -> None:
    waiter = sent(live, "1")
    live.fail_all(REVOKED)
    live.settle("1", DONE)
    live.fail_all(ToolError(Failure.INTERNAL))
    assert waiter.exception() is REVOKED


async def test_a_command_of_a_session_that_was_settled_elsewhere_is_left_alone(live: NodeSession) -> None:
    answered = sent(live, "1")
    answered.set_result(DONE)
    live.fail_all(REVOKED)
    assert answered.result() is DONE


@pytest.mark.parametrize("traceparent", [None, f"00-{'a' * 32}-{'b' * 16}-01"])
def test_a_cmd_fits_its_document_with_a_trace_and_without(
    registry: SchemaRegistry, traceparent: str | None
) -> None:
    command = Command(
        NODE_ID, f"sysecho.{NODE_ID}.echo.invoke", {}, 1000, "01HZX9K3M4P7Q8R9S0T1V2W3XY", traceparent
    )
    payload = cmd_payload(command, NOW_MS)
    assert payload.get("traceparent") == traceparent
    assert (payload["sent_at_ms"], payload["deadline_ms"]) == (NOW_MS, 1000)
    frame = {"type": "cmd", "msg_id": "01HZX9K3M4P7Q8R9S0T1V2W3XZ", "payload": payload}
    assert registry.load("session.cmd@1.0.0").is_valid(frame)
