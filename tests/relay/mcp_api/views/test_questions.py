"""What owners of boards ask: each answered by at most three calls in the kinds view, from boards' own files.

The handlers are the node's, on three boards that are made of files; the relay, its checks and its view are
the ones that ship.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from kubelet.handlers.linux_health import HealthHandler, by_code
from kubelet.handlers.machine import Printed
from relay.auth.agent_tokens import Caller
from relay.calls.envelope import Call
from relay.fleet.node_record import Where
from relay.limits.rate_limits import Allowance
from relay.routing.port import Command, CommandAnswer, LocalRouter
from schemas.addresses import KINDS_PATH
from schemas.kinds import RFC_0001, shipped_names
from schemas.labels import NodeName
from schemas.registry import read_contract
from tests.fakes.board import PI, UPTIME_US, Board, entry, show
from tests.fakes.callers import principal_of
from tests.fakes.hub import READ_ONLY, Hub
from tests.fakes.seconds import Seconds
from tests.fakes.signer import TENANT

MOST_TOOLS, MOST_BYTES, MOST_CALLS = 24, 56_000, 3
KINDS = tuple(name for name in shipped_names() if name not in RFC_0001)
CONTRACT = read_contract(KINDS)
NAMES = {"greenhouse": "site=north", "barn": "site=south", "yard": "site=south", "attic": "site=north"}
"""The attic is not connected."""

_FAILED = {
    "LoadState": "loaded",
    "ActiveState": "failed",
    "SubState": "failed",
    "Result": "exit-code",
    "ExecMainStatus": "3",
    "StateChangeTimestampMonotonic": str(UPTIME_US - 60_000_000),
}
_LOOP = {
    "LoadState": "loaded",
    "ActiveState": "activating",
    "SubState": "auto-restart",
    "Result": "exit-code",
    "NRestarts": "9",
}
_WELL = {"LoadState": "loaded", "ActiveState": "active", "SubState": "running", "NRestarts": "0"}


def greenhouse(board: Board) -> None:
    """It is hot, its pump has failed, and a process was killed for memory."""
    hot = {
        "/sys/class/hwmon/hwmon0/temp1_input": "96000",
        "/sys/class/thermal/thermal_zone0/temp": "96000",
    }
    board.write(PI | hot | {"/proc/vmstat": "oom_kill 2\n"})
    lines = [
        entry("pump: no answer on /dev/ttyUSB0", _SYSTEMD_UNIT="pump.service", SYSLOG_IDENTIFIER="pump"),
        entry("pump: starting", 1, _SYSTEMD_UNIT="pump.service", SYSLOG_IDENTIFIER="pump"),
    ]
    board.programs = {
        "systemctl": show(**{"pump.service": _FAILED, "ssh.service": _WELL}),
        "timedatectl": Printed("yes\n", 0),
        "journalctl": Printed("\n".join(lines), 0),
        "stat": Printed("1000 500 100 90 /\n", 0),
    }


def barn(board: Board) -> None:
    """Its disk is nearly full, its radio restarts again and again, and its clock is not synchronised."""
    board.write(PI | {"/proc/self/mountinfo": "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n"})
    board.programs = {
        "systemctl": show(**{"radio.service": _LOOP, "ssh.service": _WELL}),
        "timedatectl": Printed("no\n", 0),
        "journalctl": Printed(entry("radio: bad configuration", _SYSTEMD_UNIT="radio.service"), 0),
        "stat": Printed(f"1000 10 100 90 {board.root}\n", 0),
    }


def yard(board: Board) -> None:
    """It is well."""
    board.write(PI)
    board.programs = {
        "systemctl": show(**{"ssh.service": _WELL}),
        "timedatectl": Printed("yes\n", 0),
        "journalctl": Printed("", 0),
        "stat": Printed("1000 900 100 90 /\n", 0),
    }


class Boards(LocalRouter):
    """Runs each command on its board, by the node's own handlers."""

    def __init__(self, boards: Mapping[str, Board]) -> None:
        self.handlers = {
            (node_id, kind): board.handler(kind) for node_id, board in boards.items() for kind in KINDS
        }
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, command: Command) -> CommandAnswer:
        answer = CommandAnswer(asyncio.get_running_loop())
        task = asyncio.create_task(self._run(command, answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return answer

    async def _run(self, command: Command, answer: CommandAnswer) -> None:
        short, node_id, _cap_id, verb = command.tool.split(".")
        kind = CONTRACT.kinds.by_short(short)
        assert kind is not None
        result = await self.handlers[node_id, kind.name].invoke(verb, command.arguments)
        answer.set_result({"ok": True, "result": {**result, "node_id": node_id}})


class Agent:
    """An agent of the kinds view, and how many calls it has made."""

    def __init__(self, hub: Hub, boards: Mapping[str, Board]) -> None:
        self.hub = hub
        self.calls = 0
        self.boards = Boards(boards)
        gateway = hub.gateway(self.boards, Seconds(), Allowance(1e6, 1e6, 99))
        hub.make_views()
        self.methods = hub.mcp(gateway).methods
        named = [name for name in KINDS if (kind := CONTRACT.kinds.get(name)) is not None and kind.sensitive]
        token = hub.token([READ_ONLY], kinds=["*", *named])
        self.caller = Caller(principal_of(token), "http", {}, path=KINDS_PATH)

    async def listed(self) -> list[dict[str, Any]]:
        message = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
        page = await self.methods.table["tools/list"](self.caller, message, None)
        assert "nextCursor" not in page
        return list(page["tools"].document())

    async def ask(self, tool: str, **arguments: Any) -> Any:
        """Return the result of a call."""
        self.calls += 1
        assert self.calls <= MOST_CALLS
        params = {"name": tool, "arguments": arguments}
        call = Call({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params})
        answer = await self.methods.call(self.caller, call, None)
        assert not answer["isError"], answer
        return answer["structuredContent"]

    async def all(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """Return what a call of every node that has the tool is answered with, by label."""
        answer = await self.ask(tool, nodes="*", **arguments)
        return {
            each["label"]: each.get("result", each.get("values")) for each in answer["results"] if each["ok"]
        }


@pytest.fixture
async def agent(tmp_path: Path) -> AsyncIterator[Agent]:
    hub = Hub(tmp_path / "hub", CONTRACT.registry, kinds=CONTRACT.kinds)
    made: dict[str, Callable[[Board], None]] = {
        "greenhouse": greenhouse,
        "barn": barn,
        "yard": yard,
        "attic": yard,
    }
    boards: dict[str, Board] = {}
    kinds = [kind.capability for kind in CONTRACT.kinds if kind.capability is not None]
    for number, (label, make) in enumerate(made.items()):
        node_id = f"01hzx9k3m4p7q8r9s0t1v2w3x{number}"
        board = boards[node_id] = Board(tmp_path / label)
        make(board)
        hub.connect(hub.ca.issue(node_id), capabilities=kinds)
        hub.fleet.rename({node_id: NodeName(TENANT, label, (NAMES[label],))})
    agent = Agent(hub, boards)
    for node_id in boards:
        handler = agent.boards.handlers[node_id, "linux.health"]
        assert isinstance(handler, HealthHandler)
        hub.fleet.found(node_id, by_code((await handler.found()).findings))
    hub.fleet.connection_changed(list(boards)[-1], Where.NOWHERE)
    yield agent
    hub.close()


def codes(result: Mapping[str, Any]) -> list[str]:
    return [each["code"] for each in result["findings"]]


async def test_the_whole_view_is_small(agent: Agent) -> None:
    tools = await agent.listed()
    size = len(json.dumps({"tools": tools}, separators=(",", ":")).encode())
    assert len(tools) <= MOST_TOOLS
    assert size <= MOST_BYTES
    assert {"find_nodes", "health-snapshot", "journal-get"} <= {tool["name"] for tool in tools}


async def test_which_of_my_boards_has_a_problem(agent: Agent) -> None:
    found = await agent.ask("find_nodes", finding="any")
    assert {node["label"]: node["finding"]["code"] for node in found["nodes"]} == {
        "barn": "disk_nearly_full",
        "greenhouse": "unit_failed",
    }
    assert agent.calls == 1


async def test_what_is_wrong_with_the_greenhouse_and_what_its_log_says(agent: Agent) -> None:
    health = await agent.ask("health-snapshot", node="greenhouse")
    worst = health["findings"][0]
    assert (worst["code"], worst["subject"]) == ("unit_failed", "pump.service")
    asked = worst["ask"]
    assert asked["tool"] == "units-get"
    unit = await agent.ask(asked["tool"], node="greenhouse", unit=asked["unit"])
    assert (unit["state"], unit["exit_status"]) == ("failed", 3)
    log = await agent.ask("journal-get", node="greenhouse", unit="pump.service", lines=10)
    assert "no answer on /dev/ttyUSB0" in log["lines"][0]["text"]


Q = Callable[[Agent], Awaitable[bool]]


def finds(*labels: str, **query: Any) -> Q:
    """Return whether ``query`` finds the nodes ``labels`` and no others."""

    async def answered(agent: Agent) -> bool:
        found = await agent.ask("find_nodes", **query)
        return sorted(node["label"] for node in found["nodes"]) == sorted(labels)

    return answered


async def _how_hot(agent: Agent) -> bool:
    sensors = await agent.all("sensors-snapshot")
    hottest: float = max(each["c"] for each in sensors["greenhouse"]["temperatures"])
    return hottest == 96.0


async def _fills_up(agent: Agent) -> bool:
    found = await agent.ask("find_nodes", finding="disk_nearly_full")
    [label] = [node["label"] for node in found["nodes"]]
    health = await agent.ask("health-snapshot", node=label)
    [full] = [each for each in health["findings"] if each["code"] == "disk_nearly_full"]
    return (label, full["subject"], full["evidence"]["value"]) == ("barn", "/", 99.0)


async def _crashing(agent: Agent) -> bool:
    health = await agent.all("health-snapshot")
    found = {each["subject"] for one in health.values() for each in one["findings"] if "unit" in each["code"]}
    return found == {"pump.service", "radio.service"}


async def _why_it_crashes(agent: Agent) -> bool:
    log = await agent.ask("journal-get", node="barn", unit="radio.service")
    return "bad configuration" in log["lines"][0]["text"]


async def _failed_units(agent: Agent) -> bool:
    units = await agent.ask("units-snapshot", node="greenhouse", state="failed")
    return [each["unit"] for each in units["units"]] == ["pump.service"]


async def _yard_is_well(agent: Agent) -> bool:
    return codes(await agent.ask("health-snapshot", node="yard")) == []


async def _memory_hogs(agent: Agent) -> bool:
    processes = await agent.ask("procs-snapshot", node="yard", by="memory", limit=3)
    return len(processes["processes"]) <= 3


async def _network(agent: Agent) -> bool:
    network = await agent.ask("network-snapshot", node="yard")
    return list(network["resolvers"]) == ["192.168.1.1"]


async def _throttled(agent: Agent) -> bool:
    sensors = await agent.all("sensors-snapshot")
    return not any(each["throttling"]["throttled"] for each in sensors.values())


async def _which_pi(agent: Agent) -> bool:
    packages = await agent.ask("packages-snapshot", node="barn")
    return "Raspberry Pi 4" in str(packages["board"])


async def _south(agent: Agent) -> bool:
    health = await agent.ask("health-snapshot", nodes=["tag:site=south"])
    return {each["label"]: bool(each["result"]["findings"]) for each in health["results"]} == {
        "barn": True,
        "yard": False,
    }


async def _search(agent: Agent) -> bool:
    log = await agent.ask("journal-get", node="greenhouse", search="ttyUSB0", lines=5)
    return any("ttyUSB0" in line["text"] for line in log["lines"])


@pytest.mark.parametrize(
    ("question", "answered"),
    [
        ("which board is hot", finds("greenhouse", finding="hot")),
        ("how hot is the greenhouse", _how_hot),
        ("is anything urgent", finds("barn", "greenhouse", finding="error")),
        ("is anything about to fill up", _fills_up),
        ("which service keeps crashing", _crashing),
        ("why does the radio in the barn crash", _why_it_crashes),
        ("what has failed in the greenhouse", _failed_units),
        ("where was something killed for memory", finds("greenhouse", finding="process_killed_for_memory")),
        ("whose clock is wrong", finds("barn", finding="clock_not_synchronised")),
        ("which board is away", finds("attic", online=False)),
        ("is the yard well", _yard_is_well),
        ("what is wrong in the north", finds("greenhouse", tags=["site=north"], finding="any")),
        ("what uses the memory of the yard", _memory_hogs),
        ("which name server does the yard use", _network),
        ("is any board throttled", _throttled),
        ("which machine is in the barn", _which_pi),
        ("how are the boards in the south", _south),
        ("does its log mention the serial port", _search),
    ],
)
async def test_a_question_takes_at_most_three_calls(agent: Agent, question: str, answered: Q) -> None:
    assert await answered(agent), question
    assert 1 <= agent.calls <= MOST_CALLS


async def test_what_tells_more_is_named_as_the_client_lists_it_and_only_where_it_is_reached(
    agent: Agent,
) -> None:
    token = agent.hub.token([READ_ONLY], kinds=["linux.health"])
    caller = agent.caller
    agent.caller = caller._replace(principal=principal_of(token))
    answer = await agent.ask("health-snapshot", nodes=["greenhouse"])
    assert {each["ask"] for each in answer["results"][0]["result"]["findings"]} == {None}
    agent.caller = caller._replace(path="/mcp/tools")
    tool = f"health-{'01hzx9k3m4p7q8r9s0t1v2w3x0'}-health-snapshot"
    named = (await agent.ask(tool))["findings"][0]["ask"]["tool"]
    assert named == "units-01hzx9k3m4p7q8r9s0t1v2w3x0-units-get"


async def test_the_texts_that_a_third_party_wrote_are_named_wherever_they_stand(agent: Agent) -> None:
    how = {"name": "packages-snapshot", "arguments": {"nodes": ["barn"], "fields": ["distribution.name"]}}
    call = Call({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": how})
    answer = await agent.methods.call(agent.caller, call, None)
    assert answer["structuredContent"]["results"][0]["values"]["distribution.name"]
    places = {f"{before}distribution.name" for before in ("", "results.result.", "results.values.")}
    assert places <= set(answer["_meta"]["edge-kubelet/untrusted"])
