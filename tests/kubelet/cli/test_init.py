"""``kubelet init``."""

import base64
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from kubelet.cli.commands import main
from kubelet.config import read_stored
from relay.settings.environment import now_ms
from schemas.identity_files import IdentityFiles
from tests.fakes.node_command import CANNOT_RUN, DAMAGED, DONE, FAULT, GARBAGE, USAGE, Run, everything_in
from tests.fakes.server_ca import SimulatedServerCa
from tests.fakes.signer import SimulatedCa, key_named


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


OLDER_ROOT = SimulatedCa("a root of yesterday", now_ms()).root_pem
AT = ("--relay", "https://relay.example/", "--broker", "mqtts://mqtt.example")


def test_init_by_hand_leaves_behind_what_enroll_does(
    run: Run, state: IdentityFiles, ca_of_today: SimulatedCa, tmp_path: Path
) -> None:
    run("init", "--state-dir", state.root)
    options = issue(ca_of_today, state, tmp_path)
    # Two roots of each kind, as during a rotation.
    names = ("servers of today", "servers of yesterday")
    servers = "".join(SimulatedServerCa(name, now_ms()).root_pem for name in names)
    (tmp_path / "root.pem").write_text(OLDER_ROOT + servers + ca_of_today.root_pem)
    ran = run("init", "--json", "--state-dir", state.root, *options, *AT)
    assert (ran.code, ran.err, ran.facts["enrolled"]) == (DONE, "", True)
    assert state.read().root_pem == OLDER_ROOT + ca_of_today.root_pem
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
    clear = ("--relay", "http://relay.example", *AT[2:])
    ran = run("init", "--state-dir", state.root, *options, *clear)
    assert (ran.code, ran.said_in_one_line("--insecure-plain-transports")) == (USAGE, True)
    assert everything_in(state.root) == before
    assert run("init", "--state-dir", state.root, *options, *AT, "--system-roots").code == DONE
    stored = read_stored(state.root)
    assert stored is not None
    assert not stored.own_root
    assert run("kinds", "enable", "linux.units", "--state-dir", state.root).code == DONE
    assert run("init", "--state-dir", state.root, *options, *AT, "--system-roots").code == DONE
    again = read_stored(state.root)
    assert again is not None
    assert again.kinds == ("linux.units",)


@pytest.mark.parametrize(
    "options", [AT[:2], AT[2:], AT], ids=["the relay alone", "the broker alone", "both without a certificate"]
)
def test_where_relay_and_broker_are_goes_with_the_certificate(
    run: Run, state: IdentityFiles, options: tuple[str, ...]
) -> None:
    ran = run("init", "--state-dir", state.root, *options)
    assert (ran.code, ran.said_in_one_line("go together")) == (USAGE, True)
    assert not state.root.exists()


def test_a_certificate_that_is_not_this_nodes_is_refused(
    run: Run, state: IdentityFiles, ca_of_today: SimulatedCa, tmp_path: Path
) -> None:
    run("init", "--state-dir", state.root)
    options = issue(ca_of_today, state, tmp_path, key=key_named("a stranger"))
    before = everything_in(state.root)
    for arguments in (options, (*options, *AT, "--system-roots")):
        ran = run("init", "--state-dir", state.root, *arguments)
        assert (ran.code, ran.out) == (CANNOT_RUN, b"")
        assert ran.said_in_one_line("for another key")
        assert everything_in(state.root) == before


def test_a_certificate_of_another_root_is_refused(
    run: Run, state: IdentityFiles, ca_of_today: SimulatedCa, tmp_path: Path
) -> None:
    run("init", "--state-dir", state.root)
    options = issue(ca_of_today, state, tmp_path)
    (tmp_path / "root.pem").write_text(SimulatedCa("another").root_pem)
    ran = run("init", "--state-dir", state.root, *options)
    assert (ran.code, ran.said_in_one_line("not accepted: chain")) == (CANNOT_RUN, True)


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

    monkeypatch.setattr("kubelet.identity.provisioning.create_identity", broken)
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
