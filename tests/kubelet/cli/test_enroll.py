"""``kubelet enroll``."""

import grp
import json
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from kubelet.cli import options
from kubelet.cli.commands import main
from kubelet.config import DaemonPlan, read_stored
from relay.settings.environment import now_ms
from schemas.files import PRIVATE, write_atomic
from schemas.identity_files import IdentityFiles
from schemas.kind_packages import read_shipped
from schemas.process.service_host import ServiceError
from tests.fakes.enrolment_server import EnrolmentServer
from tests.fakes.node_command import CANNOT_RUN, CONFIG, DONE, NO, NOWHERE, USAGE, Ran, Run
from tests.fakes.signer import SimulatedCa

Enroll = Callable[..., Ran]
USUAL = ("linux.health", "linux.network", "linux.packages", "linux.sensors", "linux.units")


@pytest.fixture
def enrolment_server(ca_of_today: SimulatedCa) -> Iterator[EnrolmentServer]:
    with EnrolmentServer(ca_of_today, now_ms).open_in_thread() as enrolment_server:
        yield enrolment_server


@pytest.fixture
def enroll(run: Run, state: IdentityFiles, enrolment_server: EnrolmentServer) -> Enroll:
    """Return what enrols the node in ``state`` at the server, or at another URL."""

    def enroll(*options: str | Path, url: str = enrolment_server.url, state_dir: Path = state.root) -> Ran:
        token = ("--token", enrolment_server.token.text())
        return run("enroll", url, *options, *token, "--state-dir", state_dir)

    return enroll


def test_enrolling_takes_one_command_and_says_what_comes_next(
    enroll: Enroll, state: IdentityFiles, enrolment_server: EnrolmentServer
) -> None:
    ran = enroll()
    assert ran.code == DONE
    assert state.read().node_id in ran.out.decode()
    assert ran.err == f"\nnext: edge-kubelet run --state-dir {state.root}\n"
    assert state.read().root_pem == enrolment_server.ca.root_pem
    assert stat.S_IMODE(state.key.stat().st_mode) == 0o600


def test_enrolling_tells_programs_the_facts(
    enroll: Enroll, state: IdentityFiles, enrolment_server: EnrolmentServer
) -> None:
    ran = enroll("--json")
    assert (ran.code, ran.err) == (DONE, "")
    assert ran.facts == {
        "node_id": state.read().node_id,
        "tenant": "acme",
        "kid": state.read().kid,
        "relay": enrolment_server.url,
        "other_relays": [],
        "broker": "mqtt://127.0.0.1:1883",
        "kinds": list(USUAL),
        "state_dir": str(state.root),
    }


def kept(state: IdentityFiles) -> tuple[str, ...]:
    stored = read_stored(state.root)
    assert stored is not None
    return stored.kinds


def test_it_enables_what_shows_how_a_board_is_and_nothing_that_is_sensitive(
    enroll: Enroll, state: IdentityFiles
) -> None:
    assert enroll().code == DONE
    assert kept(state) == USUAL
    assert not [kind for kind in USUAL if read_shipped(kind).kind.sensitive]


@pytest.mark.parametrize(
    ("known", "enabled"),
    [
        (["linux.units", "linux.journal", "acme.oven"], ("linux.units",)),
        (["system.echo"], ()),
        ([], ()),
    ],
)
def test_no_answer_of_a_relay_enables_a_kind_and_one_that_it_does_not_know_is_named(
    enroll: Enroll,
    state: IdentityFiles,
    enrolment_server: EnrolmentServer,
    known: list[str],
    enabled: tuple[str, ...],
) -> None:
    enrolment_server.kinds = known
    ran = enroll()
    assert (ran.code, kept(state)) == (DONE, enabled)
    assert "the relay does not know linux.health, linux.network" in ran.err


@pytest.mark.parametrize(
    ("typed", "enabled"),
    [("none", ()), ("linux.journal,linux.units", ("linux.journal", "linux.units")), ("system.echo", ())],
)
def test_what_it_enables_can_be_named(
    enroll: Enroll,
    state: IdentityFiles,
    enrolment_server: EnrolmentServer,
    typed: str,
    enabled: tuple[str, ...],
) -> None:
    enrolment_server.kinds = ()
    ran = enroll("--kinds", typed)
    assert (ran.code, kept(state)) == (DONE, enabled)
    assert "the relay" not in ran.err


@pytest.mark.parametrize(
    "typed", ["", "linux.jornal", "X", "none,linux.units", "linux.units,linux.units", "a" * 65, "linux.\x1b"]
)
def test_a_kind_that_is_not_known_is_a_wrong_command_line_before_the_token_is_spent(
    enroll: Enroll, enrolment_server: EnrolmentServer, typed: str
) -> None:
    ran = enroll("--kinds", typed)
    assert (ran.code, ran.err.count("\n")) == (USAGE, 1)
    assert enrolment_server.methods == []


def test_what_it_enables_counts_more_than_what_a_start_was_told_before(
    enroll: Enroll, state: IdentityFiles
) -> None:
    told = state.root / "run.json"
    state.root.mkdir(exist_ok=True)
    told.write_text('{"kinds": "linux.journal", "ttl": "20m"}')
    assert enroll("--kinds", "none").code == DONE
    assert json.loads(told.read_text()) == {"ttl": "20m"}


def test_a_service_that_cannot_be_changed_is_said_of_a_node_that_is_enrolled(
    enroll: Enroll, state: IdentityFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = "this system has no group video"
    monkeypatch.setattr("kubelet.cli.kinds.service_steps", Mock(side_effect=ServiceError(why)))
    ran = enroll()
    assert (ran.code, kept(state)) == (DONE, USUAL)
    assert f"{why}; once that is mended: kubelet kinds enable linux.health" in ran.err


def test_a_node_that_enrols_again_keeps_its_kinds(enroll: Enroll, state: IdentityFiles) -> None:
    enroll("--kinds", "linux.journal")
    assert (enroll("--again").code, kept(state)) == (DONE, ("linux.journal",))
    assert (enroll("--again", "--kinds", "none").code, kept(state)) == (DONE, ())


def test_a_public_url_that_is_another_than_what_was_typed_is_said(
    enroll: Enroll, enrolment_server: EnrolmentServer
) -> None:
    enrolment_server.overrides = {"relay_url": "https://relay.example"}
    ran = enroll()
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
    enroll: Enroll, state: IdentityFiles, url: str, text: str
) -> None:
    ran = enroll(url=url)
    assert (ran.code, ran.said_in_one_line(text)) == (USAGE, True)
    assert not state.root.exists()


def test_a_relay_that_refuses_is_a_no(enroll: Enroll, enrolment_server: EnrolmentServer) -> None:
    enrolment_server.status = 403
    ran = enroll()
    assert (ran.code, ran.out) == (NO, b"")
    assert ran.said_in_one_line("refuses: the join token is used up, expired or withdrawn")


def test_a_relay_that_is_not_there_or_a_node_that_is_enrolled_cannot(
    enroll: Enroll, state: IdentityFiles, enrolled: IdentityFiles
) -> None:
    ran = enroll(state_dir=enrolled.root)
    assert (ran.code, ran.said_in_one_line("--again gives a revoked one")) == (CANNOT_RUN, True)
    shutil.rmtree(state.root)
    ran = enroll(url="http://127.0.0.1:9")
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
    enroll: Enroll,
    state: IdentityFiles,
    enrolment_server: EnrolmentServer,
    plan_of: Callable[..., DaemonPlan],
) -> None:
    enrolment_server.overrides = {"own_root": True, "broker": "mqtts://mqtt.example:8883"}
    enroll()
    config = plan_of("--state-dir", state.root).config
    assert (config.relay_url, str(config.broker)) == (enrolment_server.url, "mqtts://mqtt.example:8883")
    assert (config.own_root, config.plain_allowed) == (True, False)


def test_other_relays_of_the_fleet_are_kept_for_the_daemon(
    enroll: Enroll,
    state: IdentityFiles,
    enrolment_server: EnrolmentServer,
    plan_of: Callable[..., DaemonPlan],
) -> None:
    others = ["http://127.0.0.1:8701", "http://127.0.0.1:8702"]
    enroll(*others, enrolment_server.url)
    config = plan_of("--state-dir", state.root).config
    assert config.relays == (enrolment_server.url, *others)
    repeated = ("--relay", "https://relay.example", "--relay", "https://192.0.2.2,https://192.0.2.3")
    config = plan_of("--state-dir", state.root, *repeated).config
    assert config.relays == ("https://relay.example", "https://192.0.2.2", "https://192.0.2.3")


def test_options_come_before_what_was_stored(
    enroll: Enroll,
    state: IdentityFiles,
    enrolment_server: EnrolmentServer,
    plan_of: Callable[..., DaemonPlan],
) -> None:
    enroll()
    config = plan_of("--state-dir", state.root, "--broker", "mqtts://mqtt.example").config
    assert (config.relay_url, str(config.broker)) == (enrolment_server.url, "mqtts://mqtt.example:8883")
    config = plan_of("--state-dir", state.root, "--relay", "wss://relay.example/").config
    # The broker is the one that the start before was told.
    assert (config.relay_url, str(config.broker)) == ("https://relay.example", "mqtts://mqtt.example:8883")


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
    assert (ran.code, ran.said_in_one_line("enrol first with `edge-kubelet enroll`")) == (CONFIG, True)
