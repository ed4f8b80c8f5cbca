"""2. An agent points an MCP client at one URL and reads this machine.

Steps: list the tools in each era · call echo · call metrics · compare with what the machine says itself.
"""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from mcp_types import Tool

from schemas.registry import SchemaRegistry
from tests.fakes.demo import Demo
from tests.fakes.polling import until

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ERAS = pytest.mark.parametrize("era", ["2026-07-28", "legacy"])


async def tools_of(demo: Demo, era: str) -> list[Tool]:
    async with demo.client(era) as client:
        return (await client.list_tools()).tools


def uptime_s() -> float:
    return float(Path("/proc/uptime").read_text("ascii").split()[0])


@pytest.mark.holds("RFC-0001/3/one-tool-each")
@ERAS
async def test_each_capability_and_verb_is_one_tool(demo: Demo, era: str) -> None:
    assert [tool.name for tool in await tools_of(demo, era)] == demo.tool_names


@pytest.mark.holds("RFC-0005/2/tool-string")
@ERAS
async def test_a_client_that_refuses_dots_gets_dashes_and_may_call_by_either(demo: Demo, era: str) -> None:
    dotted = f"sysecho.{demo.real_node}.echo.invoke"
    dashed = dotted.replace(".", "-")
    async with demo.client(era, "?names=dashed") as client:
        names = {tool.name for tool in (await client.list_tools()).tools}
        assert dashed in names
        assert not any("." in name for name in names)
        for name in (dashed, dotted):
            result = await client.call_tool(name, {"message": "either"})
            assert (result.structured_content or {})["message"] == "either"


@pytest.mark.holds("RFC-0001/3/description-static")
@ERAS
async def test_what_is_shown_of_a_tool_is_ours_and_static(demo: Demo, era: str) -> None:
    by_name = {tool.name: tool for tool in await tools_of(demo, era)}
    echo = by_name[f"sysecho.{demo.real_node}.echo.invoke"]
    mock_echo = by_name[f"sysecho.{demo.mock_nodes[0]}.echo.invoke"]
    assert echo.description == mock_echo.description
    assert demo.real_node not in (echo.description or "")
    assert echo.annotations is not None
    assert echo.annotations.read_only_hint is True
    assert (echo.meta or {})["edge-kubelet/safety-class"] == "read_only"
    assert (echo.meta or {})["edge-kubelet/canonical-name"] == echo.name
    assert echo.input_schema["properties"]["message"]["maxLength"] == 1024


@ERAS
async def test_echo_comes_back_with_the_node_that_said_it(demo: Demo, era: str) -> None:
    async with demo.client(era) as client:
        result = await client.call_tool(
            f"sysecho.{demo.real_node}.echo.invoke", {"message": 'a "quoted" \\ ping'}
        )
    assert result.is_error is False
    content: dict[str, Any] = dict(result.structured_content or {})
    assert content.pop("received_at_ms") > 1_700_000_000_000
    assert content == {"message": 'a "quoted" \\ ping', "node_id": demo.real_node}


@pytest.mark.holds("RFC-0001/5.2/snapshot", "RFC-0001/5.4/field-meanings")
@ERAS
async def test_metrics_are_this_machine_s_own(demo: Demo, era: str) -> None:
    async with demo.client(era) as client:
        result = await client.call_tool(f"sys.{demo.real_node}.sysmetrics.snapshot", {})
    sample: dict[str, Any] = dict(result.structured_content or {})
    SchemaRegistry().load("system.metrics.sample@1.0.0").check(sample)
    assert sample["node_id"] == demo.real_node
    assert sample["cpu"]["cores"] == os.cpu_count()
    assert sample["mem"]["total_bytes"] == psutil.virtual_memory().total
    assert 0 <= uptime_s() - sample["uptime_s"] < 60
    devices = {partition.mountpoint for partition in psutil.disk_partitions()}
    assert {disk["mount"] for disk in sample["disk"]} <= devices


async def test_metrics_can_be_asked_for_in_part(demo: Demo) -> None:
    async with demo.client() as client:
        result = await client.call_tool(f"sys.{demo.real_node}.sysmetrics.snapshot", {"include": ["mem"]})
    assert set(result.structured_content or {}) == {"ts_ms", "node_id", "uptime_s", "mem"}


@pytest.mark.holds("RFC-0005/12/audit")
async def test_the_audit_holds_a_decision_and_an_outcome_and_never_the_content(demo: Demo) -> None:
    secret = "not for the audit"
    tool = f"sysecho.{demo.real_node}.echo.invoke"
    before = len(demo.audit())
    async with demo.client() as client:
        await client.call_tool(tool, {"message": secret})
    decision, outcome = _of_agents(demo.audit()[before:])
    assert (decision["decision"], outcome["outcome"]) == ("allow", "ok")
    assert decision["correlation_id"] == outcome["correlation_id"]
    for line in (decision, outcome):
        assert (line["tenant"], line["sub"], line["tool"]) == ("demo", "demo-agent", tool)
        assert line["node_id"] == demo.real_node
        assert secret not in str(line)
    assert outcome["duration_ms"] > 0


async def test_one_call_has_one_correlation_id_in_the_logs_of_both_programs_and_in_the_audit(
    demo: Demo,
) -> None:
    before = len(demo.audit())
    async with demo.client() as client:
        await client.call_tool(
            f"sysecho.{demo.real_node}.echo.invoke",
            {"message": "ping"},
            meta=cast("Any", {"traceparent": TRACEPARENT}),
        )
    correlation_id = _of_agents(demo.audit()[before:])[0]["correlation_id"]
    for program in ("relay", "kubelet"):
        log = demo.log(program)
        await until(partial(_holds, log, correlation_id))
        lines = [json.loads(line) for line in log.read_text("ascii").splitlines()]
        assert all(list(line)[:4] == ["ts", "level", "component", "event"] for line in lines)
        assert {line["component"] for line in lines} == {program}
        [line] = [line for line in lines if line.get("correlation_id") == correlation_id]
        assert line["event"] in {"call ended", "command done"}


def _of_agents(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines of an audit without those of the relay's own canaries."""
    return [line for line in lines if line.get("event") != "canaries"]


def _holds(log: Path, text: str) -> bool:
    return text in log.read_text("ascii")
