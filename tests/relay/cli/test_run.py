"""`relay run`, typed once with options and once without."""

import json
import os
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from relay.cli.options import state_files
from relay.cluster.credentials import new_nkey
from relay.settings.table import RELAY
from schemas.files import PRIVATE, PUBLIC, write_atomic
from schemas.process.command_errors import EXIT_CANNOT_RUN, EXIT_CONFIG
from tests.fakes.polling import wait_until
from tests.fakes.ports import unused_port
from tests.fakes.relay_command import FREE_PORT
from tests.fakes.relay_command import RelayCommand as Relay

BOUND_S = 60
PROGRAM = (sys.executable, "-P", "-m", "relay")


@contextmanager
def running(state: Path, port: int, *options: str) -> Iterator[Path]:
    """Run the relay until it listens at ``port``; give the file of what it prints."""
    printed = state.parent / "printed"
    command = [*PROGRAM, "run", "--state-dir", str(state), *options]
    with printed.open("wb") as file, subprocess.Popen(command, stderr=file) as process:
        try:
            wait_until(lambda: process.poll() is not None or is_open(port), BOUND_S)
            yield printed
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(BOUND_S)


def is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.integration
@pytest.mark.long
def test_a_bare_second_run_does_what_the_first_was_told(tmp_path: Path) -> None:
    state, port, other = tmp_path / "relay", unused_port(), unused_port()
    subprocess.run([*PROGRAM, "ca", "init", "--state-dir", str(state)], check=True, capture_output=True)
    told = ("--listen", f"127.0.0.1:{port}", "--no-broker", "--envelope", "shadow", "--agent-rps", "7")
    with running(state, port, *told):
        assert is_open(port)
    with running(state, port) as printed:
        assert is_open(port)
        command = [*PROGRAM, "config", "show", "--json", "--state-dir", str(state)]
        shown = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        assert {name: shown[name]["value"] for name in ("no_broker", "envelope", "agent_rps")} == {
            "no_broker": True,
            "envelope": "shadow",
            "agent_rps": 7,
        }
        assert "not as it was told" not in printed.read_text()
    with running(state, other, "--listen", f"127.0.0.1:{other}") as printed:
        assert is_open(other)
    assert f"relay: not as it was told before: --listen was 127.0.0.1:{port}\n" in printed.read_text()


RUN = ["run", "--broker", "127.0.0.1:1", "--listen", f"127.0.0.1:{FREE_PORT}", "--cluster"]


@pytest.fixture
def seed(tmp_path: Path) -> Path:
    text, _ = new_nkey(os.urandom)
    write_atomic(file := tmp_path / "relay.seed", text, PRIVATE)
    return file


@pytest.mark.integration
@pytest.mark.parametrize(
    "servers", ["foo", "http://a.example", "nats://a.example:0", "nats://a.example,b", "nats://u:secret@a"]
)
def test_what_is_no_list_of_servers_is_refused_with_the_form_that_it_must_have(
    bare: Relay, seed: Path, servers: str
) -> None:
    outcome = bare(*RUN, servers, "--cluster-credentials", seed)
    assert outcome.code == EXIT_CONFIG
    assert outcome.error.startswith("relay: --cluster: ")
    assert "nats://HOST:PORT or tls://HOST:PORT" in outcome.error
    assert "secret" not in outcome.error


@pytest.mark.integration
def test_servers_without_credentials_are_refused_with_the_option_that_is_missing(bare: Relay) -> None:
    outcome = bare(*RUN, "nats://127.0.0.1")
    assert outcome.code == EXIT_CONFIG
    assert "--cluster-credentials" in outcome.error


@pytest.mark.integration
def test_credentials_that_are_not_there_are_named(relay: Relay, tmp_path: Path) -> None:
    outcome = relay(*RUN, "nats://127.0.0.1", "--cluster-credentials", tmp_path / "missing")
    assert outcome.code == EXIT_CANNOT_RUN
    assert outcome.error == f"relay: --cluster-credentials: {tmp_path}/missing: No such file or directory"


@pytest.mark.integration
def test_credentials_that_others_can_read_are_refused_with_what_to_do(relay: Relay, seed: Path) -> None:
    seed.chmod(PUBLIC)
    outcome = relay(*RUN, "nats://127.0.0.1", "--cluster-credentials", seed)
    assert outcome.code == EXIT_CANNOT_RUN
    assert outcome.error.startswith(f"relay: --cluster-credentials: {seed} ")
    assert outcome.error.endswith(f"chmod 600 {seed}")


@pytest.mark.integration
@pytest.mark.parametrize("content", ["what is secret in it", b"secret\xff"])
def test_a_file_that_holds_no_credentials_is_refused_with_what_it_must_hold(
    relay: Relay, tmp_path: Path, content: str | bytes
) -> None:
    write_atomic(file := tmp_path / "nothing", content, PRIVATE)
    outcome = relay(*RUN, "nats://127.0.0.1", "--cluster-credentials", file)
    assert outcome.code == EXIT_CANNOT_RUN
    assert outcome.error.startswith(f"relay: --cluster-credentials: {file} ")
    assert "a certificate with its key" in outcome.error
    assert "the seed of a user's nkey" in outcome.error
    assert "secret" not in outcome.error


@pytest.mark.integration
def test_a_root_that_cannot_be_used_is_named_with_its_option(
    relay: Relay, seed: Path, tmp_path: Path
) -> None:
    given = [*RUN, "tls://127.0.0.1", "--cluster-credentials", seed, "--cluster-root", tmp_path / "missing"]
    outcome = relay(*given)
    assert outcome.code == EXIT_CANNOT_RUN
    assert outcome.error == f"relay: --cluster-root: {tmp_path}/missing: No such file or directory"


@pytest.mark.integration
def test_a_server_that_is_named_twice_is_refused(bare: Relay, seed: Path) -> None:
    outcome = bare(*RUN, "nats://127.0.0.1:4222,nats://127.0.0.1:4222", "--cluster-credentials", seed)
    assert outcome.code == EXIT_CONFIG
    assert outcome.error == "relay: --cluster: cluster names 'nats://127.0.0.1:4222' twice"


BROKER = 'broker = "127.0.0.1:1883"\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "relay.toml"
    path.write_text(BROKER)
    path.chmod(0o644)
    return path


def test_a_configuration_that_can_be_used_is_valid(bare: Relay, state: Path, file: Path) -> None:
    outcome = bare("config", "check", "--config", file)
    assert (outcome.code, outcome.out.splitlines()[0], outcome.err) == (0, f"valid: {file}", "")
    outcome = bare("config", "check", "--config", file, "--json")
    found = json.loads(outcome.out)
    assert (found["valid"], found["file"], found["problems"]) == (True, str(file), [])
    assert not state.exists()


def test_a_check_says_where_each_value_comes_from_that_is_not_the_default(
    bare: Relay, state: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state.mkdir(0o700)
    (state / "run.json").write_text(json.dumps({"envelope": "off"}))
    (state / "run.json").chmod(0o644)
    monkeypatch.setenv("RELAY_AGENT_RPS", "7")
    arguments = ("config", "check", "--config", file, "--listen", "127.0.0.1:9")
    _, *lines = bare(*arguments).out.splitlines()
    sources = {line.split()[0]: line.rpartition("  # ")[2] for line in lines}
    sources.pop("state_dir", None)
    assert sources == {
        "broker": f"{file}, line 1",
        "agent_rps": "RELAY_AGENT_RPS",
        "listen": "--listen",
        "envelope": f"kept in {state / 'run.json'}",
    }
    given = json.loads(bare(*arguments, "--json").out)["given"]
    assert {name: given[name] for name in sources} == sources


def test_every_problem_is_a_line_and_the_exit_code_is_that_of_the_daemon(bare: Relay, file: Path) -> None:
    file.write_text(BROKER + 'listne = "x"\nenvelope = "of"\n')
    outcome = bare("config", "check", "--config", file)
    assert (outcome.code, outcome.out) == (78, "")
    lines = outcome.err.splitlines()
    assert [line.startswith(f"{file}, line {number}: ") for number, line in enumerate(lines, 2)] == [True] * 2
    found = json.loads(bare("config", "check", "--config", file, "--json").out)
    assert (found["valid"], found["problems"]) == (False, lines)
    daemon = bare("run", "--config", file)
    assert (daemon.code, daemon.error) == (78, f"relay: {lines[0]} (and 1 more: see `config check`)")


def test_a_contradiction_is_found_too(bare: Relay, file: Path) -> None:
    file.write_text(BROKER + 'tls_key = "x"\n')
    outcome = bare("config", "check", "--config", file)
    assert (outcome.code, outcome.err) == (78, "--tls-certificate and --tls-key go together\n")


def test_files_that_are_not_there_are_found_before_a_start_needs_them(
    bare: Relay, file: Path, tmp_path: Path
) -> None:
    key = tmp_path / "relay.key"
    key.write_text("secret")
    file.write_text(
        'broker = "mqtts://mqtt.example"\npublic_url = "https://relay.example"\n'
        f'tls_certificate = "{tmp_path}/relay.pem"\ntls_key = "{key}"\nbroker_root = "{key}/root.pem"\n'
    )
    outcome = bare("config", "check", "--config", file)
    assert (outcome.code, outcome.out) == (EXIT_CONFIG, "")
    assert outcome.err.splitlines() == [
        f"{file}, line 3: tls_certificate '{tmp_path}/relay.pem' is not there",
        f"{file}, line 5: broker_root '{key}/root.pem' is not there",
    ]


def test_what_holds_is_shown_with_where_it_stands(
    bare: Relay, file: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELAY_AGENT_RPS", "7")
    shown = bare("config", "show", "--config", file, "--listen", "127.0.0.1:9").out
    values = tomllib.loads(shown)
    assert (values["agent_rps"], values["listen"], values["state_dir"]) == (7, "127.0.0.1:9", str(state))
    sources = {line.split()[0]: line.rpartition("  # ")[2] for line in shown.splitlines()}
    assert (sources["broker"], sources["agent_rps"]) == (f"{file}, line 1", "RELAY_AGENT_RPS")
    assert (sources["listen"], sources["envelope"]) == ("--listen", "default")
    document = json.loads(bare("config", "show", "--config", file, "--json").out)
    assert document.keys() == {setting.name for setting in RELAY.table}
    assert document["broker"] == {"value": "127.0.0.1:1883", "source": f"{file}, line 1", "reloads": False}


def test_commands_find_the_state_directory_in_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text('state_dir = "/state"\n')
    monkeypatch.setenv("RELAY_CONFIG", str(file))
    assert state_files(None).root == Path("/state")
    assert state_files(Path("/named")).root == Path("/named")


def test_commands_find_the_url_in_the_file(relay: Relay, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text('public_url = "https://relay.example"\n')
    monkeypatch.setenv("RELAY_CONFIG", str(file))
    assert "for https://relay.example/mcp" in relay("token", "issue", "--sub", "agent-1").err


def test_a_broken_file_does_not_stop_a_command_that_is_told_what_it_needs(
    bare: Relay, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("broker =")
    monkeypatch.setenv("RELAY_CONFIG", str(file))
    assert bare("ca", "init").code == 0
    assert bare("ca", "list").code == 0
    assert bare("token", "issue", "--sub", "a", "--public-url", "https://relay.example").code == 0
    assert bare("token", "issue", "--sub", "a").code == 78


@pytest.mark.integration
@pytest.mark.usefixtures("relay")
def test_a_running_relay_reads_the_file_again_at_sighup(state: Path, file: Path) -> None:
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
