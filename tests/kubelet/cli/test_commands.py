"""The node's command line itself, and the commands that start what runs."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kubelet.cli.options import agent_socket
from kubelet.config import SERVICE_SOCKET, DaemonPlan, NodeConfig
from kubelet.daemon.composition import run_daemon
from kubelet.handlers.factory import NodeHandlers
from kubelet.handlers.system_echo import EchoHandler
from kubelet.process import fail, run_until_signal
from schemas.addresses import BrokerAddress
from schemas.caller_tools import SESSION_ID_PATTERN
from schemas.identity_files import IdentityFiles
from schemas.process.command_errors import errors_in_one_line
from schemas.registry import SchemaRegistry
from tests.fakes.command_lines import without_home
from tests.fakes.node import write_identity
from tests.fakes.node_command import CANNOT_RUN, CONFIG, DONE, NOWHERE, USAGE, Run
from tests.fakes.ports import unused_port
from tests.fakes.shipped_kinds import ECHO, echo_handler
from tests.fakes.signer import NODE_ID, SimulatedNode

BOUND_S = 60


def test_a_user_without_a_home_directory_has_to_name_the_state_directory(
    run: Run, state: IdentityFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_home(monkeypatch)
    for arguments in (["init"], ["config", "show"]):
        ran = run(*arguments)
        assert ran.code == CONFIG
        assert "name the state directory with --state-dir: this user has no home directory" in ran.err
        assert run(*arguments, "--state-dir", state.root).code == DONE


def test_a_command_line_without_a_command_shows_the_help(run: Run) -> None:
    ran = run()
    assert ran.code == USAGE
    shown = ran.out.decode() + ran.err
    assert all(command in shown for command in ("init", "enroll", "announce", "verify", "run", "fleet"))


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["fly"], id="an unknown command"),
        pytest.param(["init", "--fly"], id="an unknown option"),
        pytest.param(["enroll"], id="an argument is missing"),
    ],
)
def test_a_command_line_that_cannot_be_parsed_is_an_error_of_usage(run: Run, arguments: list[str]) -> None:
    ran = run(*arguments)
    assert (ran.code, ran.out) == (USAGE, b"")
    assert ran.err


@pytest.mark.integration
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        pytest.param(["run"], "enrol first", id="options missing"),
        pytest.param(["announce", "--ttl", "1ms", "--dry-run"], "from 1s to 24h", id="a ttl too short"),
        pytest.param(["announce", "--ttl", "25h", "--dry-run"], "from 1s to 24h", id="a ttl too long"),
        pytest.param(["announce", "--ttl", "900000", "--dry-run"], "write 90s", id="a ttl without a unit"),
        pytest.param(["run", *NOWHERE, "--heartbeat", "500ms"], "from 1s to 1h", id="too many heartbeats"),
        pytest.param(["run", *NOWHERE, "--ttl", "1m59s"], "two heartbeats", id="a ttl of one heartbeat"),
        pytest.param(["run", *NOWHERE, "--loopback-port", "65536"], "65535", id="a port beyond the last"),
    ],
)
def test_a_setting_that_cannot_be_used_has_an_exit_code_of_its_own(
    run: Run, state: IdentityFiles, arguments: list[str], text: str
) -> None:
    ran = run(*arguments, "--state-dir", state.root)
    assert (ran.code, ran.out, ran.said_in_one_line(text)) == (CONFIG, b"", True)
    assert not state.root.exists()


@pytest.mark.integration
@pytest.mark.parametrize(
    ("broker", "relay", "text"),
    [
        pytest.param("nowhere", "https://relay.example", "is not HOST:PORT", id="no broker"),
        pytest.param("h:1883", "relay.example", "is not the URL of a relay", id="no relay"),
        pytest.param("h:1883", "http://relay.example", "is not encrypted", id="a relay in the clear"),
    ],
)
@pytest.mark.parametrize("command", ["run", "fleet"])
def test_an_address_that_cannot_be_used_is_refused_before_anything_starts(  # noqa: PLR0913, PLR0917 - a table
    run: Run, enrolled: IdentityFiles, command: str, broker: str, relay: str, text: str
) -> None:
    where = ("--state-dir", enrolled.root) if command == "run" else ("--identities", enrolled.root.parent)
    ran = run(command, *where, "--broker", broker, "--relay", relay)
    assert (ran.code, ran.out) == (CONFIG, b"")
    assert ran.said_in_one_line(text)


@pytest.mark.integration
def test_a_port_that_is_taken_is_said_in_one_line(run: Run, enrolled: IdentityFiles) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ran = run("run", *NOWHERE, "--state-dir", enrolled.root, "--loopback-port", port)
    assert (ran.code, ran.out) == (CANNOT_RUN, b"")
    assert ran.said_in_one_line("in use")


@pytest.mark.integration
@pytest.mark.usefixtures("signals_restored")
def test_a_daemon_that_cannot_go_on_says_why_in_its_last_line(
    enrolled: IdentityFiles, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Misfit(EchoHandler):
        capability = {**ECHO, "cap_id": "Not An Id"}  # noqa: RUF012

    def misfits(node_id: str, *_: object, **__: object) -> NodeHandlers:
        handlers = NodeHandlers()
        handlers.append(echo_handler(node_id, int, Misfit))
        return handlers

    monkeypatch.setattr("kubelet.daemon.composition.make_handlers", misfits)
    config = NodeConfig(BrokerAddress("127.0.0.1", 9), "http://127.0.0.1:9")
    with pytest.raises(SystemExit) as ended, errors_in_one_line(fail):
        run_until_signal(run_daemon(DaemonPlan(config, enrolled.root, 0), sys.stderr))
    assert ended.value.code == CANNOT_RUN
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("kubelet: ")
    assert last.endswith(": /capabilities/0/cap_id violates pattern")


def test_a_fleet_cannot_show_the_certificate_of_each_node(run: Run, tmp_path: Path) -> None:
    ran = run("fleet", *NOWHERE, "--broker", "mqtts://127.0.0.1:8883", "--identities", tmp_path)
    assert (ran.code, ran.out) == (USAGE, b"")
    assert ran.said_in_one_line("use a broker without TLS, on this machine")


def test_a_manifest_is_not_published_in_the_clear_unless_the_operator_says_so(
    run: Run, enrolled: IdentityFiles
) -> None:
    ran = run("announce", "--state-dir", enrolled.root, "--broker", "mqtt.example:1883")
    assert (ran.code, ran.out) == (CONFIG, b"")
    assert ran.said_in_one_line("--insecure-plain-transports")
    assert not (enrolled.root / "last_issued_ms").exists()


def test_a_fleet_without_identities_is_told_where_they_come_from(run: Run, tmp_path: Path) -> None:
    ran = run("fleet", *NOWHERE, "--identities", tmp_path / "mocks")
    assert (ran.code, ran.out) == (CANNOT_RUN, b"")
    assert ran.said_in_one_line("relay ca issue --mock N --out DIR")


@pytest.mark.integration
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("command", ["run", "fleet"])
def test_a_daemon_that_is_told_to_stop_has_done_its_job(
    enrolled: IdentityFiles, command: str, number: signal.Signals
) -> None:
    where = ("--state-dir", enrolled.root, "--loopback-port", "0")
    options = where if command == "run" else ("--identities", enrolled.root.parent)
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "kubelet", command, *NOWHERE, *map(str, options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        # A line means that the event loop runs, and with it the handlers of signals.
        speaks = process.stderr if command == "run" else process.stdout
        assert speaks is not None
        first = speaks.readline()
        process.send_signal(number)
        out, err = process.communicate(timeout=BOUND_S)
    assert process.returncode == DONE
    if command == "run":
        assert out == ""
        assert {json.loads(line)["level"] for line in (first + err).splitlines()} == {"info"}
    else:
        assert (first, err) == ("1 mock nodes in 1 process; Ctrl-C stops them\n", "")


@pytest.mark.integration
def test_the_manifest_goes_through_a_pipe_of_two_processes(enrolled: IdentityFiles) -> None:
    kubelet_ = [sys.executable, "-P", "-m", "kubelet"]
    where = ["--state-dir", str(enrolled.root)]
    with subprocess.Popen([*kubelet_, "announce", "--dry-run", *where], stdout=subprocess.PIPE) as announce:
        verify = subprocess.run(
            [*kubelet_, "verify", "-", "--json", *where],
            stdin=announce.stdout,
            capture_output=True,
            timeout=BOUND_S,
            check=False,
        )
    assert (announce.returncode, verify.returncode, verify.stderr) == (DONE, DONE, b"")
    assert json.loads(verify.stdout)["node_id"] == NODE_ID


def test_without_a_state_directory_the_usual_one_is_taken(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setenv("HOME", str(tmp_path))
    ran = run("init", "--json")
    assert (ran.code, ran.facts["state_dir"]) == (DONE, f"{tmp_path}/.local/state/edge-kubelet")


def test_a_node_is_not_retired_without_an_answer(run: Run, enrolled: IdentityFiles) -> None:
    ran = run("retire", "--state-dir", enrolled.root, "--relay", "https://relay.example", "--no-broker")
    assert ran.code == 1
    assert "not retired: there was no answer; --yes does without" in ran.err
    assert enrolled.read().node_id == NODE_ID


KUBELET = (sys.executable, "-P", "-m", "kubelet")


@contextmanager
def running(state: Path, *options: str) -> Iterator[list[str]]:
    """Run the node until it has started; give the lines that it printed before."""
    command = [*KUBELET, "run", "--state-dir", str(state), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        before = []
        for line in process.stderr:
            if '"kubelet started"' in line:
                break
            before.append(line)
        try:
            yield before
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=BOUND_S)
            assert process.returncode == 0


@pytest.mark.long
@pytest.mark.integration
def test_a_bare_second_run_does_what_the_first_was_told(tmp_path: Path, node_of_today: SimulatedNode) -> None:
    write_identity(tmp_path / "state", node_of_today)
    port = unused_port()
    told = ("--relay", "http://127.0.0.1:9", "--no-broker", "--loopback-port", str(port), "--ttl", "20m")
    with running(tmp_path / "state", *told):
        pass
    with running(tmp_path / "state"):
        command = [*KUBELET, "config", "show", "--json", "--state-dir", str(tmp_path / "state")]
        # Nor does a second one, which cannot run, change what is kept.
        again = subprocess.run(
            [*KUBELET, "run", "--state-dir", str(tmp_path / "state"), "--ttl", "10m"],
            check=False,
            capture_output=True,
        )
        assert (again.returncode, b"another kubelet runs" in again.stderr) == (3, True)
        shown = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    assert {name: shown[name]["value"] for name in ("loopback_port", "no_broker", "ttl")} == {
        "loopback_port": port,
        "no_broker": True,
        "ttl": "20m",
    }
    with running(tmp_path / "state", "--ttl", "30m") as before:
        assert before[0] == "kubelet: not as it was told before: --ttl was 20m\n"


def test_an_agent_finds_the_socket_beside_the_state_or_else_that_of_the_service(tmp_path: Path) -> None:
    assert agent_socket(None, tmp_path) == SERVICE_SOCKET
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "relay.sock"))
    assert agent_socket(None, tmp_path) == tmp_path / "relay.sock"
    assert agent_socket(tmp_path / "named", tmp_path) == tmp_path / "named"


def test_without_the_extra_it_says_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mcp", "mcp_types"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "kubelet.local_agent.mcp_server", raising=False)
    ran = run("mcp")
    assert (ran.code, "the extra 'agent' (docs/install.md)" in ran.err) == (CANNOT_RUN, True)


@pytest.mark.parametrize(
    "session", ["x y", "", "gogol_20261122_093000_1A2B3C4D", "gogol_20261122_093000_1a2b3c4d\n"]
)
def test_what_is_no_id_of_a_session_is_a_wrong_command_line(run: Run, session: str) -> None:
    ran = run("mcp", "--session", session)
    assert (ran.code, "is not the id of a session, for example gogol_" in ran.err) == (USAGE, True)


def test_the_id_of_a_session_is_of_the_form_of_its_document(registry: SchemaRegistry) -> None:
    opened = registry.document("session.session_open@1.0.0")
    assert f'"{SESSION_ID_PATTERN}"' in json.dumps(opened)


def test_its_help_says_what_is_listed_and_how_to_get_it(run: Run) -> None:
    shown = " ".join(run("mcp", "--help").out.decode().split())
    assert "while there are two, none is listed" in shown
    assert "the extra 'agent'" in shown
