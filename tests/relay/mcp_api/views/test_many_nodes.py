import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from relay.limits.rate_limits import Allowance
from relay.mcp_api.views.many_nodes import MAX_ANSWER_BYTES, SIDE_BY_SIDE, AnswerQueries
from relay.routing.port import Command, CommandAnswer, LocalRouter
from schemas.errors import Failure, ToolError
from tests.fakes.callers import call_of
from tests.fakes.hub import Hub
from tests.fakes.routers import HeldRouter, echoed
from tests.fakes.signer import METRICS
from tests.fakes.view_stage import ViewStage

BOUND_S = 30
FIVE_S = 5.0


def with_nodes(hub: Hub, router: Any, count: int, **members: Any) -> ViewStage:
    stage = ViewStage(hub, router)
    for number in range(count):
        stage.node(f"node {number}", **members)
    return stage


class BlackHoles(LocalRouter):
    """Nodes that never answer: commands side by side take all the time that they have, or ``hang_s``."""

    def __init__(self, hang_s: float | None = None, side_by_side: int = SIDE_BY_SIDE) -> None:
        self.stage: ViewStage | None = None
        self.budgets: list[int] = []
        self._hang_s, self._side_by_side = hang_s, side_by_side
        self._hanging: list[Callable[[], None]] = []

    def start(self, command: Command) -> CommandAnswer:
        assert self.stage is not None
        self.budgets.append(command.deadline_ms)
        seconds, hang_s = self.stage.seconds, self._hang_s or command.deadline_ms / 1000
        end, answer = seconds.now + hang_s, CommandAnswer(asyncio.get_running_loop())

        def expire() -> None:
            seconds.now = max(seconds.now, end)
            answer.expire()

        self._hanging.append(expire)
        if len(self._hanging) == self._side_by_side:  # their audit lines need not be written in one turn
            for expires in self._hanging:
                asyncio.get_running_loop().call_soon(expires)
            self._hanging.clear()
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
    router = BlackHoles(side_by_side=10)
    stage = router.stage = with_nodes(hub, router, 10)
    began = stage.seconds.now
    result = await stage.result(nodes="*")
    assert stage.seconds.now - began < FIVE_S
    assert router.budgets == pytest.approx([4900] * 10, abs=1)
    assert (result["asked"], result["answered"], result["failed"]) == (10, 0, 10)
    assert {entry["error"]["code"] for entry in result["results"]} == {"E_DEADLINE_EXCEEDED"}


async def test_a_node_for_which_no_time_is_left_is_not_called(hub: Hub) -> None:
    router = BlackHoles(hang_s=4.9)
    router.stage = stage = with_nodes(hub, router, SIDE_BY_SIDE + 9)
    errors = [entry["error"] for entry in (await stage.result(nodes="*"))["results"]]
    assert {error["code"] for error in errors} == {"E_DEADLINE_EXCEEDED"}
    assert [error["message"] for error in errors].count("No time was left; the node was not called.") == 9
    asked = [line for line in hub.audited() if line.get("decision") == "allow" and "parent" in line]
    assert len(asked) == SIDE_BY_SIDE


async def test_black_holes_leave_half_of_the_time_to_those_that_wait_for_their_turn(hub: Hub) -> None:
    router = BlackHoles()
    stage = router.stage = with_nodes(hub, router, SIDE_BY_SIDE * 2)
    await stage.result(nodes="*")
    assert router.budgets == pytest.approx([2450] * SIDE_BY_SIDE * 2, abs=1)


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


async def test_a_cursor_leads_through_all_nodes_each_once(hub: Hub) -> None:
    stage = with_nodes(hub, None, 201)
    pages = [await stage.result(nodes="*")]
    while "next" in pages[-1]:
        pages.append(await stage.result(nodes="*", cursor=pages[-1]["next"]))
    assert [(page["asked"], page.get("truncated", False)) for page in pages] == [
        (100, True),
        (100, True),
        (1, False),
    ]
    assert len({entry["node_id"] for page in pages for entry in page["results"]}) == 201
    assert len(stage.router.commands) == 201


def busy(command: Command) -> Mapping[str, Any]:
    """Answer with a CPU usage of each node's own, from the last digits of its id; of some, with none."""
    number = int(command.node_id[-6:])
    if number % 10 == 1:
        raise ToolError(Failure.NODE_OFFLINE)
    sample: dict[str, Any] = {"ts_ms": 1_760_000_000_007, "node_id": command.node_id, "uptime_s": 1}
    if number % 10 != 2:
        sample["cpu"] = {"cores": 4, "usage_pct": number / 10_000}
    return {"ok": True, "result": sample}


def measuring(hub: Hub, count: int = 201) -> tuple[ViewStage, list[int]]:
    """Return a fleet, and the numbers of the nodes that answer with a usage, the busiest first."""
    stage = with_nodes(hub, None, count, capabilities=[METRICS])
    stage.router.answer = busy
    numbers = [int(node_id[-6:]) for node_id in hub.fleet.names.members("acme", "*")]
    return stage, sorted((number for number in numbers if number % 10 not in {1, 2}), reverse=True)


async def test_which_of_201_boards_is_hot_is_one_short_answer(hub: Hub) -> None:
    stage, numbers = measuring(hub)
    asked: dict[str, Any] = {
        "nodes": "*",
        "include": ["cpu"],
        "sort": "cpu.usage_pct",
        "top": 5,
        "fields": ["cpu.usage_pct"],
    }
    answer = await stage.call("sys.snapshot", **asked)
    assert answer.result is not None
    shown = answer.result["results"]
    assert [entry["values"] for entry in shown] == [{"cpu.usage_pct": n / 10_000} for n in numbers[:5]]
    assert all(entry.keys() == {"node_id", "label", "ok", "values"} for entry in shown)
    assert (answer.result["asked"], answer.result["matched"]) == (201, len(numbers))
    assert answer.result["failures"] == [{"code": "E_NODE_OFFLINE", "nodes": answer.result["failed"]}]
    assert answer.result["lacking"] == 201 - len(numbers) - answer.result["failed"]
    assert "next" not in answer.result
    assert len(answer.text) < 900  # some 300 tokens


async def test_results_are_shown_where_a_comparison_is_true(hub: Hub) -> None:
    stage, numbers = measuring(hub)
    limit = numbers[2] / 10_000
    above = await stage.result("sys.snapshot", nodes="*", where=f"cpu.usage_pct > {limit}")
    assert {int(entry["node_id"][-6:]) for entry in above["results"]} == set(numbers[:2])
    assert above["matched"] == 2
    assert "truncated" not in above
    stage.seconds.now += 60  # each node may be read again
    least = await stage.result("sys.snapshot", nodes="*", sort="cpu.usage_pct asc", top=2)
    assert [int(entry["node_id"][-6:]) for entry in least["results"]] == numbers[:-3:-1]
    assert least["truncated"]


@pytest.mark.parametrize(
    ("query", "message", "known"),
    [
        (
            {"sort": "cpu.usage"},
            "sort: results have nothing of that name; the nearest is cpu.usage_pct.",
            "mem",
        ),
        ({"sort": "cpu.usage_pct down"}, "sort: it does not have the form of `cpu.usage_pct asc`.", "asc"),
        (
            {"where": "cpu.usage_pct is 1"},
            "where: it does not have the form of `cpu.usage_pct > 80`.",
            "> 80",
        ),
        ({"where": f"cpu.usage_pct > {'9' * 19}"}, "where: it does not have the form", "> 80"),
        ({"sort": "node_id"}, "sort: results have nothing of that name", "cpu.cores"),
        ({"where": "load.ten > 1"}, "where: results have nothing of that name", "load.one"),
        (
            {"fields": ["cpu", "memory"]},
            "fields: results have nothing of that name; the nearest is mem",
            "disk",
        ),
    ],
)
async def test_a_query_that_means_nothing_is_an_error_that_says_what_would(
    hub: Hub, query: Mapping[str, Any], message: str, known: str
) -> None:
    stage, _ = measuring(hub, 1)
    error = await stage.error("sys.snapshot", nodes="*", **query)
    assert error["code"] == "E_MANIFEST_INVALID"
    assert error["message"].startswith(message)
    assert known in error["suggested_fix"]
    assert stage.router.commands == []


@pytest.mark.parametrize("query", [{"top": 5}, {"sort": "cpu.usage_pct"}, {"cursor": "0" * 26}])
async def test_a_query_goes_with_several_nodes(hub: Hub, query: Mapping[str, Any]) -> None:
    stage = with_nodes(hub, None, 1, capabilities=[METRICS])
    error = await stage.error("sys.snapshot", node="node 0", **query)
    assert error["message"] == f"{next(iter(query))}: it goes with nodes, not with node."


async def test_times_are_readable_beside_their_milliseconds(hub: Hub) -> None:
    stage = with_nodes(hub, None, 1, capabilities=[METRICS])
    stage.router.answer = busy
    one = await stage.result("sys.snapshot", node="node 0")
    assert (one["ts_ms"], one["ts"]) == (1_760_000_000_007, "2025-10-09T08:53:20.007Z")
    stage.seconds.now += 60
    several = await stage.result("sys.snapshot", nodes="*")
    assert several["results"][0]["result"] == one
    (found,) = (await stage.result("find_nodes"))["nodes"]
    assert found["measured"]["ts"] == one["ts"]


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


async def test_a_caller_who_may_not_read_learns_of_no_capability_of_the_nodes_that_it_names(hub: Hub) -> None:
    stage = ViewStage(hub)
    stage.node("barn")
    stage.node("yard", capabilities=[METRICS])
    result = await stage.result(scopes=("tools:call:reversible",), nodes=["barn", "yard"])
    assert [entry["error"]["code"] for entry in result["results"]] == ["E_SAFETY_DENIED"] * 2
    assert stage.router.commands == []


def test_results_are_ranked_by_a_number_that_may_be_null() -> None:
    queries = AnswerQueries(
        {"properties": {"level": {"type": ["number", "null"]}, "name": {"type": "string"}}}
    )
    query = queries.read({"sort": "level desc"})
    assert query.ranked([{"level": 1}, {"level": None}, {"level": 2}]) == ([2, 0], 1)
    with pytest.raises(ToolError, match="nothing of that name"):
        queries.read({"sort": "name"})
