"""18. An operator sees what runs, and is woken when it does not.

Steps: ask both programs for their status, and their doctors · read their metrics · hold the alert rules to
Prometheus' grammar, and to the metrics that there are.
"""

import asyncio
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes.command_lines import CommandLines
from tests.fakes.demo import Demo
from tests.fakes.metrics_client import metrics_client

RULES = Path(__file__).parent.parent.parent / "docs" / "monitoring" / "alerts.yml"
NAME = re.compile(r"\bedge_(?:relay|kubelet)_[a-z_]+\b")


async def run(*command: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(
        subprocess.run, command, check=False, capture_output=True, text=True, timeout=60
    )


async def metrics_of(demo: Demo, program: str) -> str:
    """Return the page of one of the demo's programs."""
    node = httpx2.AsyncClient(base_url=demo.facts["loopback_url"], trust_env=False)
    async with metrics_client(demo.metrics) if program == "relay" else node as http:
        answer = await http.get("/metrics")
    assert (answer.status_code, answer.headers["content-type"][:10]) == (200, "text/plain")
    return answer.text


def samples_of(text: str) -> dict[str, float]:
    """Return the samples of a page by name and labels."""
    return {
        sample.name + json.dumps(sample.labels, sort_keys=True): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_both_programs_say_in_ten_lines_what_they_do(demo: Demo, commands: CommandLines) -> None:
    for program, node in (("relay", demo.facts["mcp_url"][:16]), ("kubelet", demo.real_node)):
        state_dir = str(demo.state(program))
        shown = await run(sys.executable, "-P", "-m", program, "status", "--state-dir", state_dir)
        assert (shown.returncode, len(shown.stdout.splitlines())) == (0, 10), shown
        assert node in shown.stdout
        assert re.search(r"^ready +yes$", shown.stdout, re.MULTILINE)
    as_json = commands.run("relay", "status", "--json", "--state-dir", str(demo.state("relay")))
    status = json.loads(as_json.out)
    assert (status["nodes"]["connected"], status["nodes"]["silent"]) == (3, {})


async def test_the_doctor_of_each_finds_what_the_demo_does_without(demo: Demo) -> None:
    found = {}
    for program in ("relay", "kubelet"):
        state_dir = str(demo.state(program))
        checked = await run(sys.executable, "-P", "-m", program, "doctor", "--json", "--state-dir", state_dir)
        lines = [json.loads(line) for line in checked.stdout.splitlines()]
        found[program] = {line["check"]: line["found"] for line in lines if line["severity"] != "ok"}
        assert (checked.returncode, len(lines) > 10) == (0, True), checked
    # What the relay receives by the broker is sure from the second heartbeat on.
    # Not every machine has what each kind shows. The file of the ceiling is an option's, that a start lacks.
    assert found["kubelet"].keys() - {"announce", "kinds", "process"} == set()
    # They are checked with the options that they run with, which a restart has too.
    assert found["relay"].keys() - {"announces", "process"} == {"broker"}


async def test_the_metrics_of_both_show_certificate_broker_sessions_and_calls(demo: Demo) -> None:
    async with demo.client() as client:
        await client.call_tool(f"sysecho.{demo.real_node}.echo.invoke", {"message": "counted"})
        await client.call_tool("no.such.tool.here", {})
    relay = samples_of(await metrics_of(demo, "relay"))
    node = samples_of(await metrics_of(demo, "kubelet"))
    assert relay["edge_relay_ready{}"] == node["edge_kubelet_ready{}"] == 1
    assert relay['edge_relay_subsystem_ready{"subsystem": "broker"}'] == 1
    assert node['edge_kubelet_subsystem_ready{"subsystem": "broker"}'] == 1
    now_s = 1_750_000_000
    assert relay['edge_relay_certificate_expires_timestamp_seconds{"certificate": "root"}'] > now_s
    assert node["edge_kubelet_certificate_expires_timestamp_seconds{}"] > now_s
    assert relay['edge_relay_calls_total{"code": "ok", "hop": ""}'] >= 1
    assert relay['edge_relay_calls_total{"code": "E_VERB_UNSUPPORTED", "hop": "relay"}'] >= 1
    assert node['edge_kubelet_calls_total{"code": "ok", "hop": ""}'] >= 1
    assert relay['edge_relay_canaries_total{"code": "ok", "hop": ""}'] >= 3
    assert node["edge_kubelet_sessions_total{}"] >= 1
    assert node["edge_kubelet_faults_total{}"] == 0


async def test_every_metric_of_an_alert_rule_is_there(demo: Demo) -> None:
    pages = await metrics_of(demo, "relay") + await metrics_of(demo, "kubelet")
    there = {family.name for family in text_string_to_metric_families(pages)}
    there |= {f"{name}_{suffix}" for name in there for suffix in ("total", "bucket", "count", "sum")}
    named = set(NAME.findall(RULES.read_text("ascii")))
    assert len(named) > 10
    assert named <= there


def test_prometheus_accepts_the_alert_rules() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("not installed: promtool (Debian package prometheus)")
    checked = subprocess.run(
        [promtool, "check", "rules", RULES], check=False, capture_output=True, text=True, timeout=60
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
