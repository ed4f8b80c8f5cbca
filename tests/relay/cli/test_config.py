import json
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relay.cli.options import state_files
from relay.settings.table import RELAY
from tests.fakes.ports import unused_port
from tests.fakes.relay_command import RelayCommand as Relay

BROKER = 'broker = "127.0.0.1:1883"\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "relay.toml"
    path.write_text(BROKER)
    path.chmod(0o644)
    return path


def test_a_configuration_that_can_be_used_is_valid(relay: Relay, state: Path, file: Path) -> None:
    outcome = relay("config", "check", "--config", file)
    assert (outcome.code, outcome.out.splitlines()[0], outcome.err) == (0, f"valid: {file}", "")
    outcome = relay("config", "check", "--config", file, "--json")
    found = json.loads(outcome.out)
    assert (found["valid"], found["file"], found["problems"]) == (True, str(file), [])
    assert not state.exists()


def test_a_check_says_where_each_value_comes_from_that_is_not_the_default(
    relay: Relay, state: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state.mkdir(0o700)
    (state / "run.json").write_text(json.dumps({"envelope": "off"}))
    (state / "run.json").chmod(0o644)
    monkeypatch.setenv("RELAY_AGENT_RPS", "7")
    arguments = ("config", "check", "--config", file, "--listen", "127.0.0.1:9")
    _, *lines = relay(*arguments).out.splitlines()
    sources = {line.split()[0]: line.rpartition("  # ")[2] for line in lines}
    sources.pop("state_dir", None)
    assert sources == {
        "broker": f"{file}, line 1",
        "agent_rps": "RELAY_AGENT_RPS",
        "listen": "--listen",
        "envelope": f"kept in {state / 'run.json'}",
    }
    given = json.loads(relay(*arguments, "--json").out)["given"]
    assert {name: given[name] for name in sources} == sources


def test_every_problem_is_a_line_and_the_exit_code_is_that_of_the_daemon(relay: Relay, file: Path) -> None:
    file.write_text(BROKER + 'listne = "x"\nenvelope = "of"\n')
    outcome = relay("config", "check", "--config", file)
    assert (outcome.code, outcome.out) == (78, "")
    lines = outcome.err.splitlines()
    assert [line.startswith(f"{file}, line {number}: ") for number, line in enumerate(lines, 2)] == [True] * 2
    found = json.loads(relay("config", "check", "--config", file, "--json").out)
    assert (found["valid"], found["problems"]) == (False, lines)
    daemon = relay("run", "--config", file)
    assert (daemon.code, daemon.error) == (78, f"relay: {lines[0]} (and 1 more: see `config check`)")


def test_a_contradiction_is_found_too(relay: Relay, file: Path) -> None:
    file.write_text(BROKER + 'tls_key = "x"\n')
    outcome = relay("config", "check", "--config", file)
    assert (outcome.code, outcome.err) == (78, "--tls-certificate and --tls-key go together\n")


def test_what_holds_is_shown_with_where_it_stands(
    relay: Relay, file: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELAY_AGENT_RPS", "7")
    shown = relay("config", "show", "--config", file, "--listen", "127.0.0.1:9").out
    values = tomllib.loads(shown)
    assert (values["agent_rps"], values["listen"], values["state_dir"]) == (7, "127.0.0.1:9", str(state))
    sources = {line.split()[0]: line.rpartition("  # ")[2] for line in shown.splitlines()}
    assert (sources["broker"], sources["agent_rps"]) == (f"{file}, line 1", "RELAY_AGENT_RPS")
    assert (sources["listen"], sources["envelope"]) == ("--listen", "default")
    document = json.loads(relay("config", "show", "--config", file, "--json").out)
    assert document.keys() == {setting.name for setting in RELAY.table}
    assert document["broker"] == {"value": "127.0.0.1:1883", "source": f"{file}, line 1", "reloads": False}


def test_commands_find_the_state_directory_in_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text('state_dir = "/state"\n')
    monkeypatch.setenv("RELAY_CONFIG", str(file))
    assert state_files(None).root == Path("/state")
    assert state_files(Path("/named")).root == Path("/named")


def test_commands_find_the_url_in_the_file(relay: Relay, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    relay("ca", "init")
    file.write_text('public_url = "https://relay.example"\n')
    monkeypatch.setenv("RELAY_CONFIG", str(file))
    assert "for https://relay.example/mcp" in relay("token", "issue", "--sub", "agent-1").err


def test_a_broken_file_does_not_stop_a_command_that_is_told_what_it_needs(
    relay: Relay, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("broker =")
    monkeypatch.setenv("RELAY_CONFIG", str(file))
    assert relay("ca", "init").code == 0
    assert relay("ca", "list").code == 0
    assert relay("token", "issue", "--sub", "a", "--public-url", "https://relay.example").code == 0
    assert relay("token", "issue", "--sub", "a").code == 78


@pytest.mark.integration
def test_a_running_relay_reads_the_file_again_at_sighup(relay: Relay, state: Path, file: Path) -> None:
    relay("ca", "init")
    command = [sys.executable, "-P", "-m", "relay", "run", "--state-dir", str(state), "--config", str(file)]
    with subprocess.Popen(
        [*command, "--listen", f"127.0.0.1:{unused_port()}"], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        lines = iter(process.stderr)
        until(lines, "relay started")
        file.write_text(BROKER + "agent_rps = 7\ntls_own = true\n")
        process.send_signal(signal.SIGHUP)
        # TLS without an https URL: the whole is refused.
        assert "--public-url is https" in until(lines, "settings not reloaded")["problems"][0]
        file.write_text(BROKER + 'agent_rps = 7\nbroker_pid_file = "/run/x.pid"\n')
        process.send_signal(signal.SIGHUP)
        assert until(lines, "setting reloaded")["setting"] == "agent_rps"
        assert until(lines, "setting needs a restart")["setting"] == "broker_pid_file"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode == 0


def until(lines: Iterator[str], event: str) -> dict[str, Any]:
    """Return the next line of a log that is ``event``."""
    return next(line for line in map(json.loads, lines) if line["event"] == event)
