"""The units of systemd: what systemd says of them, and what none of them may do."""

import shutil
import subprocess
from pathlib import Path

import pytest

from kubelet.config import SERVICE_SOCKET
from schemas.process.command_errors import EXIT_CONFIG, EXIT_USAGE

ROOT = Path(__file__).parents[1]
UNITS = {file.name: file for program in ("kubelet", "relay") for file in (ROOT / program / "units").iterdir()}
SERVICES = sorted(file for name, file in UNITS.items() if name.endswith(".service"))
# What may be exposed at most, in tenths, as `systemd-analyze security` computes it.
EXPOSED = {"edge-relay.service": 11, "edge-kubelet.service": 12, "edge-relay-broker.service": 11}
BOUND_S = 60
# The programs that a unit starts are installed where it runs, and not here.
NOT_HERE = "is not executable: No such file or directory"


def lines_of(unit: str) -> list[str]:
    """Return what a file says, without comments."""
    lines = UNITS[unit].read_text("utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def said(unit: str, name: str) -> list[str]:
    return [line.partition("=")[2] for line in lines_of(unit) if line.startswith(f"{name}=")]


def systemd(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=BOUND_S, check=False)


@pytest.mark.parametrize("program", ["edge-relay", "edge-kubelet"])
def test_a_daemon_is_watched_and_started_again_without_end(program: str) -> None:
    unit = f"{program}.service"
    assert said(unit, "Type") == ["notify"]
    assert said(unit, "WatchdogSec") == ["60"]
    assert said(unit, "Restart") == ["always"]
    assert said(unit, "StartLimitIntervalSec") == ["0"]
    assert said(unit, "TimeoutStopSec") == ["20"]
    assert said(unit, "SyslogIdentifier") == [program]
    assert said(unit, "LimitCORE") == ["0"]
    assert said(unit, "RestartPreventExitStatus") == [f"{EXIT_USAGE} {EXIT_CONFIG}"]


@pytest.mark.parametrize("program", ["edge-relay", "edge-kubelet"])
def test_the_state_directory_is_there_before_the_set_up_and_closed_to_all_but_its_group(program: str) -> None:
    assert f"d /var/lib/{program} 0750 {program} {program} -" in lines_of(f"{program}.tmpfiles.conf")
    assert said(f"{program}.service", "StateDirectoryMode") == ["0750"]


@pytest.mark.parametrize(("program", "most"), [("edge-relay", "2G"), ("edge-kubelet", "128M")])
def test_a_daemon_has_a_limit_of_its_memory(program: str, most: str) -> None:
    assert said(f"{program}.service", "MemoryMax") == [most]


@pytest.mark.integration
@pytest.mark.parametrize("unit", [*SERVICES, UNITS["edge-relay-broker.path"]], ids=lambda path: path.name)
def test_systemd_understands_every_line(unit: Path) -> None:
    complaints = systemd("systemd-analyze", "verify", str(unit)).stderr.splitlines()
    assert [line for line in complaints if unit.name in line and NOT_HERE not in line] == []


@pytest.mark.integration
@pytest.mark.parametrize("unit", SERVICES, ids=lambda path: path.name)
def test_every_service_is_confined(unit: Path) -> None:
    limit = EXPOSED[unit.name]
    ran = systemd("systemd-analyze", "security", "--offline=true", f"--threshold={limit}", str(unit))
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.integration
@pytest.mark.parametrize("name", ["edge-relay.sysusers.conf", "edge-kubelet.sysusers.conf"])
def test_systemd_understands_the_users(name: str) -> None:
    ran = systemd("systemd-sysusers", "--dry-run", str(UNITS[name]))
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("program", ["edge-relay", "edge-kubelet"])
def test_a_daemon_runs_as_a_static_user_that_is_declared(program: str) -> None:
    assert said(f"{program}.service", "User") == [program]
    assert said(f"{program}.service", "DynamicUser") == []
    assert any(line.split()[:2] == ["u", program] for line in lines_of(f"{program}.sysusers.conf"))


def test_a_stop_reaches_the_relay_alone_which_ends_its_broker_after_its_calls() -> None:
    assert said("edge-relay.service", "KillMode") == ["mixed"]


def test_local_agents_reach_the_socket_by_their_group() -> None:
    unit = "edge-kubelet.service"
    assert said(unit, "RuntimeDirectory") == ["edge-kubelet"]
    assert said(unit, "RuntimeDirectoryMode") == ["0750"]
    assert said(unit, "Group") == ["edge-kubelet"]
    assert "g edge-kubelet -" in lines_of("edge-kubelet.sysusers.conf")
    [start] = said(unit, "ExecStart")
    assert f"--socket ${{RUNTIME_DIRECTORY}}/{SERVICE_SOCKET.name}" in start
    assert SERVICE_SOCKET.parent.name == "edge-kubelet"


def test_what_root_runs_for_the_broker_reads_and_writes_nothing_that_the_relay_can_change() -> None:
    unit = "edge-relay-broker.service"
    [start] = said(unit, "ExecStart")
    assert start.split()[:2] == ["/usr/bin/systemctl", "try-reload-or-restart"]
    assert said(unit, "ProtectSystem") == ["strict"]
    [hidden] = said(unit, "InaccessiblePaths")
    assert set(hidden.split()) == {"-/var/lib/edge-relay", "-/var/lib/edge-relay-broker"}
    assert said(unit, "ReadWritePaths") == []


def test_the_broker_is_told_when_the_last_file_is_in_place() -> None:
    [watched] = said("edge-relay-broker.path", "PathChanged")
    directory = "/var/lib/edge-relay-broker"
    assert watched == f"{directory}/generation"
    assert f"d {directory} 2750 edge-relay edge-broker -" in lines_of("edge-relay.tmpfiles.conf")
    assert said("edge-relay.service", "ReadWritePaths") == [f"-{directory}"]
    assert "g edge-broker -" in lines_of("edge-relay.sysusers.conf")
