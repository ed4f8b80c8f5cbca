"""Attack: a trusted node sends requests for callers' tools without end, and reads none of the answers.

What must happen: what it takes of the relay's memory is bounded, its refusals are counted lines of the audit,
it fills no log, and the caller still gets the requests that it can answer.
"""

from typing import Any

import pytest

from relay.streams.caller_tools.endings import MAX_WAITING
from relay.streams.caller_tools.session import NODE_BYTES
from schemas.caller_tools import MAX_PENDING
from schemas.errors import Failure, ToolError
from schemas.frames import OneWayType
from tests.fakes.caller_stage import CallerStage, request_id
from tests.fakes.hub import Hub

REQUESTS = 3 * MAX_WAITING
KIB = 1024


def full(*_: Any) -> None:
    """Stand for the frames to a node that does not read."""
    raise ToolError(Failure.RATE_LIMITED)


async def test_the_relay_keeps_a_bounded_part_of_it(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = CallerStage(hub)
    session_id = await stage.open()
    monkeypatch.setattr(type(hub.one_way), "send", full)
    lines = len(hub.audited())
    for number in range(REQUESTS):
        stage.request(session_id, number, text="x" * 64 * KIB if number < MAX_PENDING else "")
        stage.send(OneWayType.SESSION_EVENT, session_id, message=f"noise {number}")
        stage.request(session_id, number, tool="not_lent")
    assert hub.caller_budget.total <= NODE_BYTES
    (session,) = hub.caller_sessions
    assert len(session.requests) == MAX_PENDING
    assert len(hub.caller_outbox) == MAX_WAITING
    assert hub.counted("one_way_frames_total", type="caller_tool_result", event="dropped") > 0
    assert len(hub.lines.entries()) < 20
    assert len(hub.audited()) - lines == MAX_PENDING
    hub.refusals.write()
    counted = {line["reason"]: line["count"] for line in hub.audited() if "count" in line}
    assert counted["over_capacity"] == REQUESTS - MAX_PENDING
    events = await stage.events(session_id)
    assert events[0]["request_id"] == request_id()
