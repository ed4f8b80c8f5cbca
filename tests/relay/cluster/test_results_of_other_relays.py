"""A result that comes by way of another relay is checked as that of a node of this relay."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from relay.calls.call_record import CallAnswer
from relay.routing.port import Command, CommandAnswer, LocalRouter, NodeRouter, answer_of
from schemas.errors import Failure
from schemas.payloads import CmdAck
from tests.fakes.callers import call_of
from tests.fakes.cluster import Member
from tests.fakes.hub import Hub
from tests.fakes.routers import HeldRouter, ScriptedRouter
from tests.fakes.signer import NODE_ID, NOW_MS, OTHER_NODE_ID

pytestmark = pytest.mark.integration

NAME = f"sysecho.{NODE_ID}.echo.invoke"
SHOWN = "what the node must not say"
GOOD: Mapping[str, Any] = {"message": "ping", "received_at_ms": NOW_MS, "node_id": NODE_ID}
OF_ITS_OWN = {"correlation_id", "jti", "duration_ms", "ts_ms"}
"""What differs between two calls that end alike."""


class Elsewhere(LocalRouter):
    """The nodes of other relays, for a gateway that begins commands; a relay only awaits those."""

    def __init__(self, router: NodeRouter) -> None:
        self._router = router

    def start(self, command: Command) -> CommandAnswer:
        """Ask the relay that has the node."""
        return answer_of(self._router.run(command))


async def called(hub: Hub, router: LocalRouter) -> tuple[CallAnswer, list[dict[str, Any]]]:
    """Return what a call by way of ``router`` is answered, and what the audit has of it."""
    before = len(hub.audited())
    answer = await hub.gateway(router).call(call_of(hub.token(), NAME, {"message": "ping"}))
    return answer, [without_own(line) for line in hub.audited()[before:]]


def without_own(line: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name not in OF_ITS_OWN}


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param({"text": SHOWN}, id="another form"),
        pytest.param({**GOOD, "more": SHOWN}, id="a member besides"),
        pytest.param({**GOOD, "received_at_ms": SHOWN}, id="a member of another type"),
        pytest.param({**GOOD, "message": SHOWN}, id="not what was sent"),
        pytest.param({**GOOD, "node_id": OTHER_NODE_ID}, id="another node's"),
    ],
)
async def test_a_result_that_breaks_its_schema_is_refused_as_of_a_node_of_its_own(
    hub: Hub, asker: Member, owner: Member, broken: Mapping[str, Any]
) -> None:
    hub.connect(hub.ca.issue())

    def answer(_command: Command) -> CmdAck:
        return {"ok": True, "result": broken}

    own, audited_of_own = await called(hub, ScriptedRouter(answer))
    await owner.hold(NODE_ID, asker)
    calling = asyncio.create_task(called(hub, Elsewhere(asker.part.router)))
    assert isinstance(owner.local, HeldRouter)
    command, waiter = await owner.local.next()
    waiter.set_result(answer(command))
    other, audited = await calling

    assert own.error is not None
    assert other.error is not None
    assert own.error["code"] == Failure.RESULT_INVALID.value.code
    assert without_own(other.error) == without_own(own.error)
    assert other.result is None
    assert audited == audited_of_own
    assert [line.get("code") for line in audited][-1] == Failure.RESULT_INVALID.value.code
    parts = [other.text, hub.lines.getvalue(), hub.access_lines.getvalue(), asker.fake.lines.getvalue()]
    for part in (*parts, owner.fake.lines.getvalue(), json.dumps(hub.audited())):
        assert SHOWN not in part
        assert OTHER_NODE_ID not in part
