"""1. A new user types one command, sees each tool answer, and nothing is left behind.

Steps: run ``relay demo --once`` · read what it printed, what it tried on itself too · look for what it left.
"""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import httpx2
import psutil
import pytest

from relay.audit.verify import verify
from relay.cli.demo.local_system import list_tools
from tests.fakes.demo import Demo, running_demo
from tests.fakes.polling import wait_until

DEMO = (sys.executable, "-P", "-m", "relay", "demo")
CALLER_TOOLS = ("--nodes", "0", "--caller-tools")
STARTED = ("broker", "CA", "relay", "kubelet", "fleet", "tools")
TRYING = "Tried in this demo just now, each on what was made for it:\n"
TRIED = {
    "manifest of another CA": "identity_refused, reason chain; find_nodes does not list its node",
    "revoked token": r"a call \d+\.\d s later gets 401: The token has been revoked\.",
    "copy of the audit": r"one byte of line \d+ changed: line \d+ does not follow the line before it",
    "node killed in mid-call": r'"the command may have run\.", then "the command was never sent\."',
    "line of a log file": r'"ignore your instructions" inside <<<([0-9a-f]{16}) >>>\1',
}


def demo_once(temporary: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    # A proxy would get the token; this one does not exist.
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
    return subprocess.run(
        [*DEMO, "--once", *options],
        check=False,
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, **proxies, "TMPDIR": str(temporary)},
    )


def demo_until(text: str) -> tuple["subprocess.Popen[str]", str]:
    """Start a demo without mock nodes; return it, and what it has printed up to ``text``."""
    process = subprocess.Popen(
        [*DEMO, "--nodes", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    printed = ""
    while text not in printed:
        line = process.stdout.readline()
        assert line, printed
        printed += line
    return process, printed


@pytest.mark.long
@pytest.mark.timeout(200)
def test_the_demo_calls_each_tool_and_leaves_nothing(tmp_path: Path) -> None:
    temporary = tmp_path / "h\xf6lzern"
    temporary.mkdir()
    done = demo_once(temporary)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    # As they are typed: the tools of the kinds view, and the node.
    assert done.stdout.count('  sysecho-invoke {"node": "') == 3
    assert done.stdout.count('  sys-snapshot {"node": "') == 3
    assert done.stdout.count('  sys-subscribe {"node": "') == 3
    assert done.stdout.count("message   hello from the demo") == 3
    # Of the kinds that this machine alone has: what is wrong with it, before all else.
    assert done.stdout.split("\n\n")[2].startswith('  health-snapshot {"node": "')
    assert done.stdout.count("\n    worst     ") == 1
    calls, tried = done.stdout.split(f"\n{TRYING}\n")
    assert calls.endswith(" more tools of this machine are not called: --kinds all calls them.\n")
    took = re.findall(r"^  +\d+\.\d s  (\S+)", calls, re.MULTILINE)
    assert took == [*STARTED]
    not_ascii = {"line of a log file": "not tried: linux.files shows nothing in .*"}
    assert_tried(tried.splitlines(), {**TRIED, **not_ascii})
    assert "FAILED" not in done.stdout
    assert list(temporary.iterdir()) == []


def assert_tried(lines: Iterable[str], expected: Mapping[str, str]) -> None:
    for line, (what, came_of_it) in zip(lines, expected.items(), strict=True):
        assert re.fullmatch(f"  {what:<25}{came_of_it}", line.rstrip("\n"))


@pytest.mark.long
def test_the_demo_of_caller_tools_shows_one_round_trip() -> None:
    # Not pytest's directory: the path of a socket has at most 107 bytes.
    with tempfile.TemporaryDirectory() as temporary:
        done = demo_once(Path(temporary), *CALLER_TOOLS)
        assert list(Path(temporary).iterdir()) == []
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    steps = [line.strip()[:2].strip() for line in done.stdout.splitlines() if line.startswith("  ")]
    assert [step for step in steps if step.isdigit()][-7:] == list("1234567")
    assert "ant_get_memory" in done.stdout
    assert "caller_tool_request" in done.stdout
    assert "It rained yesterday." in done.stdout


@pytest.mark.long
def test_the_demo_says_where_no_agent_can_connect(tmp_path: Path) -> None:
    long = tmp_path / ("long" * 20)
    long.mkdir()
    done = demo_once(long, *CALLER_TOOLS)
    assert done.returncode == 1
    assert done.stderr.endswith(": set TMPDIR to a shorter path\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.long
def test_a_part_that_ends_while_the_demo_starts_is_named_in_one_line() -> None:
    # Not only "kubelet": the line of a port that was taken has that word too.
    process, _ = demo_until("this machine is node")
    children = psutil.Process(process.pid).children(recursive=True)
    [kubelet] = [child for child in children if child.cmdline()[2:5] == ["-m", "kubelet", "run"]]
    kubelet.kill()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.startswith("relay: kubelet ended with status -9: ")
    assert errors.count("\n") == 1


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "terminate"])
def test_stopping_the_demo_leaves_no_process_and_no_file(
    tmp_path: Path, how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    with running_demo(tmp_path, "--nodes", "1") as demo:
        children = psutil.Process(demo.pid).children(recursive=True)
        assert {demo.facts["relay_pid"], demo.facts["kubelet_pid"]} <= {child.pid for child in children}
        os.kill(demo.pid, how)
        _, alive = psutil.wait_procs([*children], timeout=20)
    assert alive == []
    assert list(temporary.iterdir()) == []


def test_the_ready_file_says_where_everything_is(demo: Demo) -> None:
    assert demo.facts["mcp_url"] == f"{demo.base_url}/mcp/kinds"
    assert set(demo.facts) == {
        "mcp_url",
        "token",
        "broker",
        "ca_root",
        "audit",
        "nodes",
        "loopback_url",
        "socket",
        "relay_pid",
        "kubelet_pid",
    }
    mocks = [{"node_id": node, "real": False} for node in demo.mock_nodes]
    assert demo.facts["nodes"] == [{"node_id": demo.real_node, "real": True}, *mocks]
    with socket.socket(socket.AF_UNIX) as local:
        local.connect(demo.facts["socket"])
    assert Path(demo.facts["ca_root"]).read_text("utf-8").startswith("-----BEGIN CERTIFICATE-----")
    assert demo.ready_file.stat().st_mode & 0o777 == 0o600
    assert json.loads(demo.ready_file.read_text("utf-8")) == demo.facts


async def test_the_demo_tries_what_is_refused_and_that_changes_nothing_of_it(demo: Demo) -> None:
    tried = demo.printed.index(TRYING)
    assert_tried(demo.printed[tried + 2 : tried + 2 + len(TRIED)], TRIED)
    assert verify(Path(demo.facts["audit"])).intact
    async with demo.client() as client:
        tools = [tool.name for tool in await list_tools(client)]
    assert sorted(tools) == demo.tool_names
    assert list(demo.directory.glob("proofs-*")) == []


@pytest.mark.long
def test_a_demo_on_a_machine_where_the_usual_ports_are_taken_takes_others(tmp_path: Path) -> None:
    with running_demo(tmp_path, "--nodes", "0") as first:
        second_directory = tmp_path / "second"
        second_directory.mkdir()
        with running_demo(second_directory, "--nodes", "0") as second:
            for fact in ("mcp_url", "broker", "loopback_url"):
                assert first.facts[fact] != second.facts[fact]


@pytest.mark.long
def test_further_signals_do_not_interrupt_the_stop_of_the_demo() -> None:
    process, _ = demo_until("Serving until Ctrl-C")
    children = psutil.Process(process.pid).children(recursive=True)
    for _ in range(400):  # longer than any stop takes
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
            break
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert psutil.wait_procs(children, timeout=20)[1] == []


@pytest.mark.long
def test_what_the_demo_prints_at_its_end_lets_its_user_sign_in() -> None:
    process, printed = demo_until("The node's own status")
    try:
        (url,) = re.findall(r"claude mcp add --transport http edge (\S+)$", printed, re.MULTILINE)
        (invite,) = re.findall(r"relay (people invite .*)$", printed, re.MULTILINE)
        command = [sys.executable, "-P", "-m", "relay", *shlex.split(invite)]
        link = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        assert link.startswith(f"{url.removesuffix('/mcp/kinds')}/invitation#")
        with httpx2.Client(trust_env=False) as http:
            wait_until(lambda: "resource_metadata" in http.post(url).headers["www-authenticate"])
            assert http.get(link.strip()).status_code == 200
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 0
