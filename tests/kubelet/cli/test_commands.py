import asyncio
import base64
import grp
import io
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import kubelet.cli.announce_once
import kubelet.daemon.agent
import kubelet.identity.provisioning
from kubelet.cli import options
from kubelet.cli.commands import main
from kubelet.clock import now_ms
from kubelet.config import DaemonPlan, NodeConfig, read_stored, store
from kubelet.daemon.agent import run_agent
from kubelet.handlers.echo import EchoHandler
from kubelet.process import fail, run_until_signal
from schemas.addresses import BrokerAddress
from schemas.files import PRIVATE, write_atomic
from schemas.identity_files import IdentityFiles
from schemas.manifest import etag_of
from schemas.process.command_errors import errors_in_one_line
from tests.fakes.built_commands import build_commands_once
from tests.fakes.enrolment_server import EnrolmentServer
from tests.fakes.homeless import without_home
from tests.fakes.mqtt_listener import MqttListener
from tests.fakes.node import write_identity
from tests.fakes.server_ca import SimulatedServerCa
from tests.fakes.signer import DAY_MS, NODE_ID, OTHER_NODE_ID, SimulatedCa, SimulatedNode, key_named

BOUND_S = 20
DONE, NO, USAGE, CANNOT_RUN, FAULT, CONFIG = 0, 1, 2, 3, 70, 78
NOWHERE = ("--broker", "127.0.0.1:9", "--relay", "http://127.0.0.1:9")


@dataclass(frozen=True)
class Ran:
    """What a command left."""

    code: int
    out: bytes
    err: str

    @property
    def facts(self) -> dict[str, Any]:
        facts = json.loads(self.out)
        assert isinstance(facts, dict)
        return facts

    def said_in_one_line(self, text: str) -> bool:
        """Return whether standard error is one line, ours, with ``text`` in it."""
        return self.err.startswith("kubelet: ") and self.err.count("\n") == 1 and text in self.err


Run = Callable[..., Ran]


def run_as_process(*arguments: str | Path) -> Ran:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "kubelet", *map(str, arguments)],
        check=False,
        capture_output=True,
        timeout=60,
    )
    assert b"Traceback" not in done.stderr
    return Ran(done.returncode, done.stdout, done.stderr.decode())


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Run:
    """Return what runs a command line in this process, from its entry point to its exit code."""
    build_commands_once(monkeypatch)

    def run(*arguments: str | Path, stdin: bytes = b"") -> Ran:
        if arguments[:1] == ("run",):
            return run_as_process(*arguments)  # it becomes the daemon, in whatever process it is
        monkeypatch.setattr(sys, "argv", ["kubelet", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code: object = 0
        try:
            main()
        except SystemExit as exit_:
            code = exit_.code
        out, err = capfdbinary.readouterr()
        assert b"Traceback" not in err
        assert isinstance(code, int)
        return Ran(code, out, err.decode())

    return run


@pytest.fixture
def state(tmp_path: Path) -> IdentityFiles:
    """An empty place for an identity."""
    return IdentityFiles(tmp_path / "state")


@pytest.fixture
def enrolled(state: IdentityFiles, node_of_today: SimulatedNode) -> IdentityFiles:
    """The files of a node that a CA has vouched for."""
    return write_identity(state.root, node_of_today)


@pytest.fixture
def ca_of_today() -> SimulatedCa:
    return SimulatedCa("a root of today", now_ms())


def everything_in(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()} if directory.exists() else {}


# --- the command line itself


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


# --- init


def test_init_makes_an_identity_and_says_what_comes_next(run: Run, state: IdentityFiles) -> None:
    ran = run("init", "--state-dir", state.root)
    identity = state.read()
    assert ran.code == DONE
    assert identity.node_id in ran.out.decode()
    assert f"relay ca issue {state.csr}" in ran.err
    assert stat.S_IMODE(state.key.stat().st_mode) == 0o600


def test_init_tells_programs_the_facts(run: Run, state: IdentityFiles) -> None:
    ran = run("init", "--json", "--state-dir", state.root)
    identity = state.read()
    assert (ran.code, ran.err) == (DONE, "")
    assert ran.facts == {
        "node_id": identity.node_id,
        "state_dir": str(state.root),
        "csr": str(state.csr),
        "leaf": str(state.leaf),
        "kid": identity.kid,
        "enrolled": False,
    }


def test_init_a_second_time_changes_nothing(run: Run, state: IdentityFiles) -> None:
    first = run("init", "--json", "--state-dir", state.root)
    before = everything_in(state.root)
    second = run("init", "--json", "--state-dir", state.root)
    assert (second.code, second.facts) == (DONE, first.facts)
    assert everything_in(state.root) == before


def test_init_keeps_the_secret_to_itself(run: Run, state: IdentityFiles) -> None:
    ran = run("init", "--state-dir", state.root)
    key = state.read().key
    shown = ran.out + ran.err.encode()
    assert bytes(key).hex().encode() not in shown
    assert base64.b64encode(bytes(key)).rstrip(b"=") not in shown


@pytest.mark.parametrize("option", ["--certificate", "--root"])
def test_a_certificate_and_its_root_go_together(
    run: Run, state: IdentityFiles, tmp_path: Path, option: str
) -> None:
    ran = run("init", "--state-dir", state.root, option, tmp_path / "some.pem")
    assert (ran.code, ran.out) == (USAGE, b"")
    assert ran.said_in_one_line("--certificate and --root go together")
    assert not state.root.exists()


def issue(ca: SimulatedCa, state: IdentityFiles, directory: Path, **override: Any) -> tuple[str | Path, ...]:
    """Write what a CA hands out for the node in ``state``, and return the options that install it."""
    own = state.read()
    issued = {"node_id": own.node_id, "key": own.key, "now_ms": now_ms(), **override}
    node = ca.issue(**issued)
    (directory / "leaf.pem").write_text(node.leaf_pem)
    (directory / "root.pem").write_text(node.root_pem)
    return "--certificate", directory / "leaf.pem", "--root", directory / "root.pem"


def test_init_installs_the_certificate_of_a_ca_as_often_as_one_likes(
    run: Run, state: IdentityFiles, ca_of_today: SimulatedCa, tmp_path: Path
) -> None:
    first = run("init", "--json", "--state-dir", state.root)
    options = issue(ca_of_today, state, tmp_path)
    for _ in range(2):
        ran = run("init", "--json", "--state-dir", state.root, *options)
        assert (ran.code, ran.err, ran.facts["enrolled"]) == (DONE, "", True)
        assert ran.facts["node_id"] == first.facts["node_id"]
        assert ran.facts["kid"] == state.read().kid != first.facts["kid"]
    assert state.read().root_pem == ca_of_today.root_pem


AT = ("--relay", "https://relay.example/", "--broker", "mqtts://mqtt.example")


def issue_with_servers(
    ca: SimulatedCa, state: IdentityFiles, directory: Path
) -> tuple[tuple[str | Path, ...], str]:
    """Write the same, with two roots of servers, as during a rotation; return the latter too."""
    options = issue(ca, state, directory)
    names = ("servers of today", "servers of yesterday")
    servers = "".join(SimulatedServerCa(name, now_ms()).root_pem for name in names)
    (directory / "root.pem").write_text(servers + ca.root_pem)
    return options, servers


def test_init_by_hand_leaves_behind_what_enroll_does(
    run: Run, state: IdentityFiles, ca_of_today: SimulatedCa, tmp_path: Path
) -> None:
    run("init", "--state-dir", state.root)
    options, servers = issue_with_servers(ca_of_today, state, tmp_path)
    ran = run("init", "--json", "--state-dir", state.root, *options, *AT)
    assert (ran.code, ran.err, ran.facts["enrolled"]) == (DONE, "", True)
    assert state.read().root_pem == ca_of_today.root_pem
    assert state.server_roots.read_text() == servers
    stored = read_stored(state.root)
    assert stored is not None
    assert (stored.relay_url, str(stored.broker)) == ("https://relay.example", "mqtts://mqtt.example:8883")
    assert stored.own_root


def test_init_by_hand_of_a_relay_that_this_machine_trusts_already_says_so(
    run: Run, state: IdentityFiles, ca_of_today: SimulatedCa, tmp_path: Path
) -> None:
    run("init", "--state-dir", state.root)
    options = issue(ca_of_today, state, tmp_path)
    before = everything_in(state.root)
    ran = run("init", "--state-dir", state.root, *options, *AT)
    assert (ran.code, ran.said_in_one_line("relay ca roots --pem")) == (CANNOT_RUN, True)
    assert everything_in(state.root) == before
    assert run("init", "--state-dir", state.root, *options, *AT, "--system-roots").code == DONE
    stored = read_stored(state.root)
    assert stored is not None
    assert not stored.own_root


@pytest.mark.parametrize(
    "options", [AT[:2], AT[2:], AT], ids=["the relay alone", "the broker alone", "both without a certificate"]
)
def test_where_relay_and_broker_are_goes_with_the_certificate(
    run: Run, state: IdentityFiles, options: tuple[str, ...]
) -> None:
    ran = run("init", "--state-dir", state.root, *options)
    assert (ran.code, ran.said_in_one_line("go together")) == (USAGE, True)
    assert not state.root.exists()


@pytest.mark.parametrize(
    ("override", "text"),
    [
        pytest.param({"key": key_named("a stranger")}, "for another key", id="another key"),
        pytest.param({"node_id": OTHER_NODE_ID}, "for another node", id="another node"),
        pytest.param({"now_ms": 1_700_000_000_000, "valid_days": 1}, "not accepted: validity", id="over"),
    ],
)
def test_a_certificate_that_is_not_this_nodes_is_refused(
    run: Run, state: IdentityFiles, tmp_path: Path, override: dict[str, Any], text: str
) -> None:
    run("init", "--state-dir", state.root)
    ca = SimulatedCa("old enough", 1_700_000_000_000)
    options = issue(ca, state, tmp_path, **override)
    before = everything_in(state.root)
    for arguments in (options, (*options, *AT, "--system-roots")):
        ran = run("init", "--state-dir", state.root, *arguments)
        assert (ran.code, ran.out) == (CANNOT_RUN, b"")
        assert ran.said_in_one_line(text)
        assert everything_in(state.root) == before


def test_a_certificate_of_another_root_is_refused(
    run: Run, state: IdentityFiles, ca_of_today: SimulatedCa, tmp_path: Path
) -> None:
    run("init", "--state-dir", state.root)
    options = issue(ca_of_today, state, tmp_path)
    (tmp_path / "root.pem").write_text(SimulatedCa("another").root_pem)
    ran = run("init", "--state-dir", state.root, *options)
    assert (ran.code, ran.said_in_one_line("not accepted: chain")) == (CANNOT_RUN, True)


GARBAGE = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"


@pytest.mark.parametrize("file", ["leaf.pem", "root.pem"])
@pytest.mark.parametrize(
    "content",
    [
        pytest.param(None, id="missing"),
        pytest.param(b"", id="empty"),
        pytest.param(b"\x30\x82\xff\xfe", id="DER"),
        pytest.param(GARBAGE.encode(), id="PEM of nothing"),
    ],
)
def test_a_file_that_holds_no_certificate_is_refused(  # noqa: PLR0913, PLR0917 - what it takes to have one
    run: Run, state: IdentityFiles, ca_of_today: SimulatedCa, tmp_path: Path, file: str, content: bytes | None
) -> None:
    run("init", "--state-dir", state.root)
    options = issue(ca_of_today, state, tmp_path)
    before = everything_in(state.root)
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_bytes(content)
    ran = run("init", "--state-dir", state.root, *options)
    assert (ran.code, ran.out) == (CANNOT_RUN, b"")
    assert ran.said_in_one_line("")
    assert everything_in(state.root) == before


DAMAGED = "-----BEGIN CERTIFICATE-----\nAAAAA\n-----END CERTIFICATE-----\n"


@pytest.mark.parametrize("option", ["--certificate", "--root"])
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        pytest.param(b"\x30\x82\xff\xfe", "it is not text", id="DER"),
        pytest.param(DAMAGED.encode(), "a certificate is not base64", id="no base64"),
        pytest.param(b"x" * 20_000, "the PEM is too large", id="too large"),
    ],
)
def test_of_a_file_that_is_no_pem_the_name_and_the_reason_are_printed(  # noqa: PLR0913, PLR0917 - a table and the parts
    run: Run,
    state: IdentityFiles,
    ca_of_today: SimulatedCa,
    tmp_path: Path,
    option: str,
    content: bytes,
    reason: str,
) -> None:
    run("init", "--state-dir", state.root)
    options = issue(ca_of_today, state, tmp_path)
    file = Path(options[options.index(option) + 1])
    file.write_bytes(content)
    ran = run("init", "--state-dir", state.root, *options)
    assert (ran.code, ran.err) == (CANNOT_RUN, f"kubelet: {file} is not PEM: {reason}\n")


def test_a_fault_of_a_command_is_not_taken_for_an_answer(
    state: IdentityFiles, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_arguments: object) -> str:
        raise ValueError("a fault")

    monkeypatch.setattr(kubelet.identity.provisioning, "create_identity", broken)
    monkeypatch.setattr(sys, "argv", ["kubelet", "init", "--state-dir", str(state.root)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == FAULT
    shown = capsys.readouterr()
    assert "Traceback" in shown.err
    assert "ValueError: a fault" in shown.err


def test_a_place_that_cannot_hold_an_identity_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ran = run("init", "--state-dir", tmp_path / "file" / "state")
    assert (ran.code, ran.said_in_one_line(str(tmp_path / "file"))) == (CANNOT_RUN, True)


# --- enroll


@pytest.fixture
def enrolment_server(ca_of_today: SimulatedCa) -> Iterator[EnrolmentServer]:
    with EnrolmentServer(ca_of_today, now_ms).open_in_thread() as enrolment_server:
        yield enrolment_server


def test_enrolling_takes_one_command_and_says_what_comes_next(
    run: Run, state: IdentityFiles, enrolment_server: EnrolmentServer
) -> None:
    ran = run(
        "enroll", enrolment_server.url, "--token", enrolment_server.token.text(), "--state-dir", state.root
    )
    assert ran.code == DONE
    assert state.read().node_id in ran.out.decode()
    assert ran.err == f"\nnext: kubelet run --state-dir {state.root}\n"
    assert state.read().root_pem == enrolment_server.ca.root_pem
    assert stat.S_IMODE(state.key.stat().st_mode) == 0o600


def test_enrolling_tells_programs_the_facts(
    run: Run, state: IdentityFiles, enrolment_server: EnrolmentServer
) -> None:
    ran = run(
        "enroll",
        enrolment_server.url,
        "--token",
        enrolment_server.token.text(),
        "--state-dir",
        state.root,
        "--json",
    )
    assert (ran.code, ran.err) == (DONE, "")
    assert ran.facts == {
        "node_id": state.read().node_id,
        "tenant": "acme",
        "kid": state.read().kid,
        "relay": enrolment_server.url,
        "other_relays": [],
        "broker": "mqtt://127.0.0.1:1883",
        "state_dir": str(state.root),
    }


def test_a_public_url_that_is_another_than_what_was_typed_is_said(
    run: Run, state: IdentityFiles, enrolment_server: EnrolmentServer
) -> None:
    enrolment_server.overrides = {"relay_url": "https://relay.example"}
    ran = run(
        "enroll", enrolment_server.url, "--token", enrolment_server.token.text(), "--state-dir", state.root
    )
    assert ran.code == DONE
    assert "the relay's public URL is https://relay.example: this node will use that" in ran.err
    assert "ask for `relay run --node-broker`" in ran.err


@pytest.mark.parametrize("way", ["file", "environment"])
def test_a_join_token_need_not_stand_on_the_command_line(  # noqa: PLR0913, PLR0917 - what it takes
    run: Run,
    state: IdentityFiles,
    enrolment_server: EnrolmentServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
) -> None:
    options: list[str | Path] = []
    if way == "file":
        write_atomic(tmp_path / "token", enrolment_server.token.text() + "\n", PRIVATE)
        options = ["--token-file", tmp_path / "token"]
    else:
        monkeypatch.setenv("EDGE_JOIN_TOKEN", enrolment_server.token.text())
    ran = run("enroll", enrolment_server.url, *options, "--state-dir", state.root)
    assert ran.code == DONE
    assert enrolment_server.token.text() not in ran.out.decode() + ran.err


@pytest.mark.parametrize("mode", [0o666, 0o644, 0o640], ids=oct)
def test_a_join_token_that_others_can_read_or_change_is_not_used(
    run: Run, state: IdentityFiles, enrolment_server: EnrolmentServer, tmp_path: Path, mode: int
) -> None:
    write_atomic(tmp_path / "token", enrolment_server.token.text(), mode)
    ran = run("enroll", enrolment_server.url, "--token-file", tmp_path / "token", "--state-dir", state.root)
    assert ran.code == CANNOT_RUN
    assert f"chmod 600 {tmp_path / 'token'}" in ran.err
    assert not state.exists()


def test_a_join_token_that_is_no_text_is_said_in_one_line(
    run: Run, state: IdentityFiles, enrolment_server: EnrolmentServer, tmp_path: Path
) -> None:
    write_atomic(tmp_path / "token", b"\xff", PRIVATE)
    ran = run("enroll", enrolment_server.url, "--token-file", tmp_path / "token", "--state-dir", state.root)
    assert ran.code == USAGE
    assert "holds no join token" in ran.err


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        pytest.param([], USAGE, "with --token-file or with --token", id="no token"),
        pytest.param(["--token", "ekj1.a.b.c"], USAGE, "not a join token", id="no join token"),
        pytest.param(["--token", "a", "--token-file", "b"], USAGE, "exclude each other", id="two"),
        pytest.param(["--token-file", "/not/there"], CANNOT_RUN, "/not/there", id="no file"),
    ],
)
def test_without_a_join_token_there_is_no_enrolling(
    run: Run, state: IdentityFiles, options: list[str], code: int, text: str
) -> None:
    ran = run("enroll", "https://relay.example", *options, "--state-dir", state.root)
    assert (ran.code, ran.out) == (code, b"")
    assert ran.said_in_one_line(text)
    assert "ekj1.a" not in ran.err
    assert not state.root.exists()


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("relay.example", "is not the URL of a relay"),
        ("http://relay.example", "use https, or say --insecure-plain-transports"),
    ],
)
def test_a_relay_that_cannot_be_spoken_to_is_not(
    run: Run, state: IdentityFiles, enrolment_server: EnrolmentServer, url: str, text: str
) -> None:
    ran = run("enroll", url, "--token", enrolment_server.token.text(), "--state-dir", state.root)
    assert (ran.code, ran.said_in_one_line(text)) == (USAGE, True)
    assert not state.root.exists()


def test_a_relay_that_refuses_is_a_no(
    run: Run, state: IdentityFiles, enrolment_server: EnrolmentServer
) -> None:
    enrolment_server.status = 403
    ran = run(
        "enroll", enrolment_server.url, "--token", enrolment_server.token.text(), "--state-dir", state.root
    )
    assert (ran.code, ran.out) == (NO, b"")
    assert ran.said_in_one_line("refuses: the join token is used up, expired or withdrawn")


def test_a_relay_that_is_not_there_or_a_node_that_is_enrolled_cannot(
    run: Run, state: IdentityFiles, enrolled: IdentityFiles, enrolment_server: EnrolmentServer
) -> None:
    ran = run(
        "enroll", enrolment_server.url, "--token", enrolment_server.token.text(), "--state-dir", enrolled.root
    )
    assert (ran.code, ran.said_in_one_line("is enrolled already")) == (CANNOT_RUN, True)
    shutil.rmtree(state.root)
    ran = run(
        "enroll", "http://127.0.0.1:9", "--token", enrolment_server.token.text(), "--state-dir", state.root
    )
    assert (ran.code, ran.said_in_one_line("cannot be reached")) == (CANNOT_RUN, True)


class Became(BaseException):
    """The process would have become the daemon."""


@pytest.fixture
def plan_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., DaemonPlan]:
    """Return what tells the plan with which ``kubelet run`` would become the daemon."""

    def become(_program: str, command: list[str], _environment: dict[str, str]) -> None:
        raise Became(command[-1])

    def plan_of(*arguments: str | Path) -> DaemonPlan:
        monkeypatch.setattr(os, "execve", become)
        monkeypatch.setattr(sys, "argv", ["kubelet", "run", *map(str, arguments)])
        with pytest.raises(Became) as became:
            main()
        return DaemonPlan.from_json(str(became.value))

    return plan_of


def test_after_enrolling_the_daemon_needs_to_be_told_nothing(
    run: Run, state: IdentityFiles, enrolment_server: EnrolmentServer, plan_of: Callable[..., DaemonPlan]
) -> None:
    enrolment_server.overrides = {"own_root": True, "broker": "mqtts://mqtt.example:8883"}
    run("enroll", enrolment_server.url, "--token", enrolment_server.token.text(), "--state-dir", state.root)
    config = plan_of("--state-dir", state.root).config
    assert (config.relay_url, str(config.broker)) == (enrolment_server.url, "mqtts://mqtt.example:8883")
    assert (config.own_root, config.plain_allowed) == (True, False)


def test_other_relays_of_the_fleet_are_kept_for_the_daemon(
    run: Run, state: IdentityFiles, enrolment_server: EnrolmentServer, plan_of: Callable[..., DaemonPlan]
) -> None:
    others = ["http://127.0.0.1:8701", "http://127.0.0.1:8702"]
    typed = (enrolment_server.url, *others, enrolment_server.url)
    run("enroll", *typed, "--token", enrolment_server.token.text(), "--state-dir", state.root)
    config = plan_of("--state-dir", state.root).config
    assert config.relays == (enrolment_server.url, *others)
    repeated = ("--relay", "https://relay.example", "--relay", "https://192.0.2.2,https://192.0.2.3")
    config = plan_of("--state-dir", state.root, *repeated).config
    assert config.relays == ("https://relay.example", "https://192.0.2.2", "https://192.0.2.3")


def test_options_come_before_what_was_stored(
    run: Run, state: IdentityFiles, enrolment_server: EnrolmentServer, plan_of: Callable[..., DaemonPlan]
) -> None:
    run("enroll", enrolment_server.url, "--token", enrolment_server.token.text(), "--state-dir", state.root)
    config = plan_of("--state-dir", state.root, "--broker", "mqtts://mqtt.example").config
    assert (config.relay_url, str(config.broker)) == (enrolment_server.url, "mqtts://mqtt.example:8883")
    config = plan_of("--state-dir", state.root, "--relay", "wss://relay.example/").config
    assert (config.relay_url, str(config.broker)) == ("https://relay.example", "mqtt://127.0.0.1:1883")


def test_local_agents_connect_where_the_operator_says_and_else_beside_the_state(
    tmp_path: Path, enrolled: IdentityFiles, plan_of: Callable[..., DaemonPlan]
) -> None:
    beside = [*NOWHERE, "--state-dir", enrolled.root]
    assert plan_of(*beside).socket == enrolled.root / "relay.sock"
    assert plan_of(*beside, "--socket", tmp_path / "s").socket == tmp_path / "s"


def test_local_agents_are_the_members_of_one_group_where_there_is_such_a_group(
    enrolled: IdentityFiles, plan_of: Callable[..., DaemonPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = grp.getgrgid(os.getegid())
    monkeypatch.setattr(options, "SOCKET_GROUP", group.gr_name)
    assert plan_of(*NOWHERE, "--state-dir", enrolled.root).socket_group == group.gr_gid
    monkeypatch.setattr(options, "SOCKET_GROUP", "no-such-group-here")
    assert plan_of(*NOWHERE, "--state-dir", enrolled.root).socket_group is None


def test_a_state_directory_with_a_long_path_has_no_socket_and_says_so(
    tmp_path: Path, plan_of: Callable[..., DaemonPlan], capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan_of(*NOWHERE, "--state-dir", tmp_path / ("x" * 100)).socket is None
    assert "name a --socket" in capsys.readouterr().err


@pytest.mark.integration
def test_a_node_that_is_told_nothing_is_told_what_to_do(run: Run, state: IdentityFiles) -> None:
    ran = run("run", "--state-dir", state.root)
    assert (ran.code, ran.said_in_one_line("enrol first with `kubelet enroll`")) == (CONFIG, True)


# --- announce


def test_a_dry_run_prints_the_manifest_and_not_a_byte_more(run: Run, enrolled: IdentityFiles) -> None:
    before = everything_in(enrolled.root)
    ran = run("announce", "--dry-run", "--state-dir", enrolled.root, "--ttl", "1m")
    assert (ran.code, ran.err) == (DONE, "")
    assert ran.facts["node_id"] == NODE_ID
    assert ran.facts["expires_at_ms"] - ran.facts["issued_at_ms"] == 60_000
    assert run("verify", "-", "--state-dir", enrolled.root, "--json", stdin=ran.out).facts["etag"] == etag_of(
        ran.out
    )
    assert everything_in(enrolled.root) == before


def test_a_dry_run_of_a_node_without_a_ca_says_what_it_is_worth(run: Run, state: IdentityFiles) -> None:
    run("init", "--state-dir", state.root)
    ran = run("announce", "--dry-run", "--state-dir", state.root)
    assert ran.code == DONE
    assert "no relay will trust this manifest" in ran.err
    assert run("verify", "-", "--state-dir", state.root, stdin=ran.out).code == DONE


def test_announcing_needs_a_broker_or_a_dry_run(run: Run, enrolled: IdentityFiles) -> None:
    ran = run("announce", "--state-dir", enrolled.root)
    assert (ran.code, ran.out) == (CONFIG, b"")
    assert ran.said_in_one_line("`kubelet enroll`, name a --broker HOST:PORT, or use --dry-run")


def test_an_enrolled_node_announces_to_the_broker_of_its_enrolment(
    run: Run, enrolled: IdentityFiles, broker: BrokerAddress
) -> None:
    store(NodeConfig(broker, "http://127.0.0.1:9"), enrolled.root)
    ran = run("announce", "--state-dir", enrolled.root)
    assert (ran.code, ran.out) == (DONE, b"")
    assert "published" in ran.err


def test_announcing_to_what_is_no_address_is_refused(run: Run, enrolled: IdentityFiles) -> None:
    ran = run("announce", "--state-dir", enrolled.root, "--broker", "nowhere")
    assert (ran.code, ran.said_in_one_line("is not HOST:PORT")) == (CONFIG, True)


def test_what_is_announced_lies_on_the_broker(
    run: Run, enrolled: IdentityFiles, broker: BrokerAddress
) -> None:
    ran = run("announce", "--state-dir", enrolled.root, "--broker", str(broker))
    assert (ran.code, ran.out) == (DONE, b"")

    async def retained() -> bytes:
        async with MqttListener(broker, f"$devices/{NODE_ID}/announce").listening() as listener:
            return (await listener.next()).payload

    wire = asyncio.run(retained())
    assert ran.err.endswith(f"published {etag_of(wire)}\n")
    assert run("verify", "-", "--state-dir", enrolled.root, stdin=wire).code == DONE


@pytest.mark.integration
def test_a_broker_that_takes_nothing_is_a_no(
    run: Run, enrolled: IdentityFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubelet.cli.announce_once, "_CONNECT_TIMEOUT_S", 0.05)
    ran = run("announce", "--state-dir", enrolled.root, "--broker", "127.0.0.1:9")
    assert (ran.code, ran.out) == (NO, b"")
    assert ran.err.splitlines()[-1] == "kubelet: the broker at mqtt://127.0.0.1:9 did not take the manifest"


@pytest.mark.integration
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["announce", "--dry-run"], id="announce"),
        pytest.param(["run", *NOWHERE], id="run"),
    ],
)
def test_a_node_that_was_never_made_is_sent_to_init(
    run: Run, state: IdentityFiles, arguments: list[str]
) -> None:
    ran = run(*arguments, "--state-dir", state.root)
    assert (ran.code, ran.out) == (CANNOT_RUN, b"")
    assert ran.said_in_one_line("run `kubelet init`")


@pytest.mark.integration
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["init"], id="init"),
        pytest.param(["announce", "--dry-run"], id="announce"),
        pytest.param(["run", *NOWHERE], id="run"),
    ],
)
def test_a_key_that_others_can_read_is_refused(
    run: Run, enrolled: IdentityFiles, arguments: list[str]
) -> None:
    enrolled.key.chmod(0o644)
    ran = run(*arguments, "--state-dir", enrolled.root)
    assert (ran.code, ran.out) == (CANNOT_RUN, b"")
    assert ran.said_in_one_line(f"chmod 600 {enrolled.key}")


# --- verify


@pytest.fixture
def wire(node_of_today: SimulatedNode) -> bytes:
    now = now_ms()
    return node_of_today.manifest(issued_at_ms=now, expires_at_ms=now + DAY_MS)


@pytest.mark.parametrize("end", [b"", b"\n"], ids=["as published", "as an editor saves it"])
def test_a_good_manifest_is_told_by_its_facts(
    run: Run, enrolled: IdentityFiles, node_of_today: SimulatedNode, wire: bytes, end: bytes
) -> None:
    ran = run("verify", "-", "--json", "--state-dir", enrolled.root, stdin=wire + end)
    assert (ran.code, ran.err) == (DONE, "")
    assert ran.facts == {
        "valid": True,
        "node_id": NODE_ID,
        "tenant": node_of_today.tenant,
        "kid": node_of_today.kid,
        "etag": etag_of(wire),
        "expires_at_ms": json.loads(wire)["expires_at_ms"],
    }


def test_people_read_until_when_a_manifest_is_valid(run: Run, enrolled: IdentityFiles, wire: bytes) -> None:
    ran = run("verify", "-", "--state-dir", enrolled.root, stdin=wire)
    end = datetime.fromtimestamp(json.loads(wire)["expires_at_ms"] // 1000, UTC)
    rows = dict(line.split(maxsplit=1) for line in ran.out.decode().splitlines())
    assert rows["valid"] == "yes"
    assert rows["expires"] == f"{end:%Y-%m-%d %H:%M} UTC"


def test_a_file_can_be_checked_with_the_root_alone(
    run: Run, state: IdentityFiles, node_of_today: SimulatedNode, wire: bytes, tmp_path: Path
) -> None:
    for name, content in (("leaf", node_of_today.leaf_pem), ("root", node_of_today.root_pem)):
        (tmp_path / name).write_text(content)
    (tmp_path / "manifest").write_bytes(wire)
    options = ("--identity", tmp_path / "leaf", "--root", tmp_path / "root", "--state-dir", state.root)
    ran = run("verify", tmp_path / "manifest", *options)
    assert (ran.code, ran.err) == (DONE, "")
    assert NODE_ID in ran.out.decode()


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        pytest.param(b'"max_concurrency":4', b'"max_concurrency":5', "signature", id="a limit"),
        pytest.param(b'"sig":"', b'"sig":"A', "schema", id="a longer signature"),
        pytest.param(b'"node_id":"01hzx9k3m4p7q8r9s0t1v2w3xy"',
                     b'"node_id":"01hzx9k3m4p7q8r9s0t1v2w3xz"', "id_mismatch", id="the node"),
        pytest.param(b'"system.echo"', b'"system.ecko"', "kind_unsupported", id="a kind"),
        pytest.param(b'{"capabilities"', b'{ "capabilities"', "not_canonical", id="a space"),
        pytest.param(b"}", b"", "not_json", id="a brace"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("as_json", [False, True], ids=["for people", "for programs"])
def test_a_manifest_that_was_flipped_is_a_no_in_one_line(  # noqa: PLR0913, PLR0917 - a table of flips
    run: Run, enrolled: IdentityFiles, wire: bytes, before: bytes, after: bytes, reason: str, *, as_json: bool
) -> None:
    flipped = wire.replace(before, after, 1)
    assert flipped != wire
    options = ["--json"] if as_json else []
    ran = run("verify", "-", *options, "--state-dir", enrolled.root, stdin=flipped)
    assert (ran.code, ran.err) == (NO, f"kubelet: not valid: {reason}\n")
    if as_json:
        assert ran.facts == {"valid": False, "reason": reason}
    else:
        assert ran.out == b""


def test_a_manifest_without_its_leaf_cannot_be_checked(run: Run, state: IdentityFiles, wire: bytes) -> None:
    ran = run("verify", "-", "--state-dir", state.root, stdin=wire)
    assert (ran.code, ran.said_in_one_line("leaf.pem")) == (CANNOT_RUN, True)


def test_a_file_that_is_not_there_cannot_be_checked(
    run: Run, enrolled: IdentityFiles, tmp_path: Path
) -> None:
    ran = run("verify", tmp_path / "nothing", "--state-dir", enrolled.root)
    assert (ran.code, ran.said_in_one_line("nothing")) == (CANNOT_RUN, True)


@pytest.mark.parametrize("option", ["--identity", "--root"])
@pytest.mark.parametrize(
    "content", [b"", b"\x30\x82\xff\xfe", GARBAGE.encode()], ids=["empty", "DER", "garbage"]
)
def test_what_is_no_certificate_vouches_for_nothing(  # noqa: PLR0913, PLR0917 - what it takes to have one
    run: Run, enrolled: IdentityFiles, wire: bytes, tmp_path: Path, option: str, content: bytes
) -> None:
    (tmp_path / "some.pem").write_bytes(content)
    ran = run("verify", "-", option, tmp_path / "some.pem", "--state-dir", enrolled.root, stdin=wire)
    assert ran.code in {NO, CANNOT_RUN}
    assert (ran.out, ran.said_in_one_line("")) == (b"", True)


@pytest.mark.parametrize("file", ["leaf.pem", "root.pem"])
def test_a_stored_certificate_that_is_damaged_cannot_vouch(
    run: Run, enrolled: IdentityFiles, wire: bytes, file: str
) -> None:
    (enrolled.root / file).write_bytes(b"\xff")
    ran = run("verify", "-", "--state-dir", enrolled.root, stdin=wire)
    assert (ran.code, ran.said_in_one_line("is damaged: it is not text")) == (CANNOT_RUN, True)


def test_a_stored_root_that_is_not_base64_cannot_vouch(
    run: Run, enrolled: IdentityFiles, wire: bytes
) -> None:
    (enrolled.root / "root.pem").write_text(DAMAGED)
    ran = run("verify", "-", "--state-dir", enrolled.root, stdin=wire)
    assert (ran.code, ran.said_in_one_line("a certificate is not base64")) == (CANNOT_RUN, True)


# --- run and fleet


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
        capability = {**EchoHandler(NODE_ID, int).capability, "cap_id": "Not An Id"}  # noqa: RUF012

    monkeypatch.setattr(kubelet.daemon.agent, "make_handlers", lambda node_id, *_: [Misfit(node_id, int)])
    config = NodeConfig(BrokerAddress("127.0.0.1", 9), "http://127.0.0.1:9")
    with pytest.raises(SystemExit) as ended, errors_in_one_line(fail):
        run_until_signal(run_agent(DaemonPlan(config, enrolled.root, 0), sys.stderr))
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
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("HOME", str(tmp_path))
    ran = run("init", "--json")
    assert (ran.code, ran.facts["state_dir"]) == (DONE, f"{tmp_path}/.local/state/edge-kubelet")


def test_a_node_is_not_retired_without_an_answer(run: Run, enrolled: IdentityFiles) -> None:
    ran = run("retire", "--state-dir", enrolled.root, "--relay", "https://relay.example", "--no-broker")
    assert ran.code == 1
    assert "not retired: there was no answer; --yes does without" in ran.err
    assert enrolled.read().node_id == NODE_ID
