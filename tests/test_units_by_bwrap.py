"""The units' mounts and limits by bwrap: the services run, and can write and see no more than they may.

It takes no systemd: where that cannot run as PID 1, this is what holds the units.
"""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.polling import wait_until
from tests.fakes.ports import unused_port
from tests.fakes.unit_by_bwrap import ConfinedUnit

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[1]
BOUND_S = 60
RELAY_STATE = ("--state-dir", "/var/lib/edge-relay")
NODE_STATE = ("--state-dir", "/var/lib/edge-kubelet")


def run(unit: ConfinedUnit, *command: str, **environment: str) -> str:
    process = unit.begin(*command, **environment)
    out, err = process.communicate(timeout=BOUND_S)
    assert process.returncode == 0, out + err
    return out.strip()


@pytest.fixture
def relay(tmp_path: Path) -> ConfinedUnit:
    return unit(tmp_path, "relay")


@pytest.fixture
def node(tmp_path: Path) -> ConfinedUnit:
    return unit(tmp_path, "kubelet")


def unit(work: Path, program: str) -> ConfinedUnit:
    if shutil.which("bwrap") is None:
        pytest.skip("bwrap is not installed")
    made = ConfinedUnit(ROOT / program / "units" / f"edge-{program}.service", work / program)
    process = made.begin("true")
    if reason := process.communicate(timeout=BOUND_S)[1]:
        pytest.skip(f"bwrap cannot run here: {reason.strip()}")
    return made


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    running: list[subprocess.Popen[str]] = []
    yield running
    for process in reversed(running):
        process.kill()
        process.communicate(timeout=BOUND_S)


@pytest.mark.long
def test_a_call_reaches_the_node(
    relay: ConfinedUnit, node: ConfinedUnit, started: list[subprocess.Popen[str]]
) -> None:
    url = f"http://127.0.0.1:{unused_port()}"
    own = ("--public-url", url)
    run(relay, "python", "-m", "relay", "ca", "init", *RELAY_STATE)
    listen = ("--listen", url.removeprefix("http://"))
    started.append(relay.begin("python", "-m", "relay", "run", *RELAY_STATE, *own, *listen, "--no-broker"))
    join = run(relay, "python", "-m", "relay", "join-token", "create", *RELAY_STATE, *own).split()[0]
    enroll = ("python", "-m", "kubelet", "enroll", url, *NODE_STATE)

    def enrolled() -> bool:
        process = node.begin(*enroll, EDGE_JOIN_TOKEN=join)
        process.communicate(timeout=BOUND_S)
        return process.returncode == 0

    wait_until(enrolled, BOUND_S)
    port = ("--loopback-port", str(unused_port()))
    started.append(node.begin("python", "-m", "kubelet", "run", *NODE_STATE, *port, "--no-broker"))
    token = run(relay, "python", "-m", "relay", "token", "issue", "--sub", "ant", *RELAY_STATE, *own)
    [listed] = json.loads(run(relay, "python", "-m", "relay", "node", "list", "--json", *RELAY_STATE))
    name = f"sys.{listed['node_id']}.sysmetrics.snapshot"
    call = ("python", "-m", "relay", "call", name, "{}", "--url", f"{url}/mcp")

    def called() -> bool:
        process = relay.begin(*call, EDGE_TOKEN=token.split()[-1])
        return "uptime_s" in process.communicate(timeout=BOUND_S)[0]

    wait_until(called, BOUND_S)


@pytest.mark.parametrize("name", ["relay", "node"])
def test_only_the_state_directory_can_be_written(name: str, request: pytest.FixtureRequest) -> None:
    confined: ConfinedUnit = request.getfixturevalue(name)
    state = "/var/lib/edge-relay" if name == "relay" else "/var/lib/edge-kubelet"
    run(confined, "touch", f"{state}/file")
    for place in ("/etc", "/usr", "/opt", "/var/lib", "/var/log"):
        run(confined, "test", "!", "-w", place)


def test_the_relay_sees_no_home_and_neither_dumps_its_memory(relay: ConfinedUnit, node: ConfinedUnit) -> None:
    assert run(relay, "ls", "-A", "/root", "/home", "/tmp").split() == ["/home:", "/root:", "/tmp:"]  # noqa: S108
    for confined in (relay, node):
        limits = run(confined, "cat", "/proc/self/limits").splitlines()
        found = {line[:25].strip(): line[25:].split()[0] for line in limits}
        assert (found["Max core file size"], found["Max open files"]) == ("0", str(confined.open_files))
        held = run(confined, "cat", "/proc/self/status").splitlines()
        assert "CapBnd:\t0000000000000000" in held
        assert "NoNewPrivs:\t1" in held
