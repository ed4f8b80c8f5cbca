import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from relay.allowance import Allowance
from relay.routing.answer import CommandAnswer
from relay.routing.port import Command, LocalRouter
from relay.views.many_nodes import MAX_ANSWER_BYTES, SIDE_BY_SIDE
from schemas.errors import Failure, ToolError
from tests.fakes.callers import call_of
from tests.fakes.hub import Hub
from tests.fakes.routers import HeldRouter, echoed
from tests.fakes.signer import METRICS
from tests.fakes.view_stage import ViewStage

BOUND_S = 10
FIVE_S = 5.0


def with_nodes(hub: Hub, router: Any, count: int, **members: Any) -> ViewStage:
    stage = ViewStage(hub, router)
    for number in range(count):
        stage.node(f"node {number}", **members)
    return stage


class BlackHoles(LocalRouter):
    """Nodes that never answer: each command takes all the time that it has."""

    def __init__(self) -> None:
        self.stage: ViewStage | None = None
        self.budgets: list[int] = []

    def start(self, command: Command) -> CommandAnswer:
        assert self.stage is not None
        self.budgets.append(command.deadline_ms)
        self.stage.seconds.now += command.deadline_ms / 1000
        answer = CommandAnswer(asyncio.get_running_loop())
        asyncio.get_running_loop().call_soon(answer.expire)
        return answer


async def test_no_more_than_sixteen_nodes_are_asked_at_a_time(hub: Hub) -> None:
    router = HeldRouter()
    stage = with_nodes(hub, router, SIDE_BY_SIDE + 4)
    call = asyncio.create_task(stage.result(nodes="*"))
    held = [await router.next() for _ in range(SIDE_BY_SIDE)]
    assert router.waiting.empty()
    for command, answer in held:
        answer.set_result(echoed(command))
    for _ in range(4):
        command, answer = await router.next()
        answer.set_result(echoed(command))
    assert (await asyncio.wait_for(call, BOUND_S))["answered"] == SIDE_BY_SIDE + 4


async def test_black_holes_use_up_five_seconds_together_and_no_more(hub: Hub) -> None:
    router = BlackHoles()
    stage = router.stage = with_nodes(hub, router, 10)
    began = stage.seconds.now
    result = await stage.result(nodes="*")
    assert stage.seconds.now - began < FIVE_S
    assert router.budgets == pytest.approx([4900], abs=1)
    assert (result["asked"], result["answered"], result["failed"]) == (10, 0, 10)
    errors = [entry["error"] for entry in result["results"]]
    assert {error["code"] for error in errors} == {"E_DEADLINE_EXCEEDED"}
    assert [error["message"] for error in errors].count("No time was left; the node was not called.") == 9
    asked = [line for line in hub.audited() if line.get("decision") == "allow" and "parent" in line]
    assert len(asked) == 1


async def test_black_holes_leave_half_of_the_time_to_those_that_wait_for_their_turn(hub: Hub) -> None:
    router = BlackHoles()
    stage = router.stage = with_nodes(hub, router, SIDE_BY_SIDE + 2)
    await stage.result(nodes="*")
    assert router.budgets == pytest.approx([2450, 1225, 1225], abs=1)


async def test_a_node_that_fails_does_not_fail_the_others(hub: Hub) -> None:
    failing: dict[str, Failure] = {}

    def answer(command: Command) -> Mapping[str, Any]:
        if command.node_id in failing:
            raise ToolError(failing[command.node_id])
        return echoed(command)

    stage = ViewStage(hub)
    stage.router.answer = answer
    ids = {name: stage.node(name) for name in ("good", "off", "busy")}
    failing |= {ids["off"]: Failure.NODE_OFFLINE, ids["busy"]: Failure.RATE_LIMITED}
    result = await stage.result(nodes=["off", "busy", "good"])
    assert [entry["ok"] for entry in result["results"]] == [False, False, True]
    codes = [entry["error"]["code"] for entry in result["results"] if not entry["ok"]]
    assert codes == ["E_NODE_OFFLINE", "E_RATE_LIMITED"]
    assert all(("result" in entry) is entry["ok"] for entry in result["results"])


async def test_members_count_towards_the_agents_limit(hub: Hub) -> None:
    stage = ViewStage(hub, per_agent=Allowance(0.001, 3.5, 64))
    for name in ("a barn", "a yard", "a gate"):
        stage.node(name)
    result = await stage.result(nodes="*")
    assert (result["answered"], result["failed"]) == (2, 1)
    (failed,) = [entry["error"] for entry in result["results"] if not entry["ok"]]
    assert failed["code"] == "E_RATE_LIMITED"


async def test_more_nodes_than_one_call_asks_are_left_out_and_that_is_said(hub: Hub) -> None:
    stage = with_nodes(hub, None, 101)
    result = await stage.result(nodes="*")
    assert (result["asked"], len(result["results"]), result["truncated"]) == (100, 100, True)
    assert len(stage.router.commands) == 100


async def test_an_answer_is_cut_at_its_limit_and_that_is_said(hub: Hub) -> None:
    space = {"total_bytes": 2**53 - 1, "available_bytes": 2**53 - 1}
    disk = {"mount": "/" + "m" * 60, "fs_type": "ext4", **space}

    def large(command: Command) -> Mapping[str, Any]:
        sample = {"ts_ms": 1_760_000_000_000, "node_id": command.node_id, "uptime_s": 1, "disk": [disk] * 64}
        return {"ok": True, "result": sample}

    stage = with_nodes(hub, None, 100, capabilities=[METRICS])
    stage.router.answer = large
    answer = await stage.call("sys.snapshot", nodes="*")
    assert answer.result is not None
    shown = answer.result["results"]
    assert (answer.result["asked"], answer.result["answered"], answer.result["truncated"]) == (100, 100, True)
    assert 0 < len(shown) < 100
    assert all(entry["ok"] for entry in shown)
    assert MAX_ANSWER_BYTES / 2 < len(answer.text) <= MAX_ANSWER_BYTES + 1024


async def test_a_caller_that_disconnects_cancels_the_members(hub: Hub) -> None:
    router = HeldRouter()
    stage = with_nodes(hub, router, 3)
    call = asyncio.create_task(stage.result(nodes="*"))
    answers = [(await router.next())[1] for _ in range(3)]
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert all(answer.cancelled() for answer in answers)
    outcomes = [line["code"] for line in hub.audited() if "outcome" in line]
    assert outcomes == ["cancelled"] * 4


async def test_a_revoked_token_ends_the_call_and_its_members(hub: Hub) -> None:
    router = HeldRouter()
    stage = with_nodes(hub, router, 2)
    request = call_of(hub.token(), "sysecho.invoke", {"message": "ping", "nodes": "*"})
    call = asyncio.create_task(stage.gateway.call(request))
    answers = [(await router.next())[1] for _ in range(2)]
    stage.gateway.revoke({request.caller.principal.jti})
    answer = await asyncio.wait_for(call, BOUND_S)
    assert answer.error is not None
    assert answer.error["code"] == "E_SAFETY_DENIED"
    assert all(each.cancelled() for each in answers)


async def test_a_members_call_has_the_callers_trace_id_and_labels_but_not_its_key(hub: Hub) -> None:
    stage = ViewStage(hub)
    stage.node("barn")
    trace = f"00-{'a' * 32}-{'b' * 16}-01"
    meta = {
        "edge_kubelet__idempotency_key": "k",
        "traceparent": trace,
        "edge_kubelet__task_id": "task",
        "edge_kubelet__correlation_id": "order-17",
    }
    for _ in range(2):
        await stage.result(nodes="barn", meta=meta)
    (command,) = stage.router.commands
    assert (command.traceparent or "").split("-")[1] == "a" * 32
    assert {line["caller_correlation_id"] for line in hub.audited()} == {"order-17"}
    lines = hub.access_lines.entries()
    assert [line["taskId"] for line in lines if command.node_id in line["metadata"]["toolId"]] == ["task"]
