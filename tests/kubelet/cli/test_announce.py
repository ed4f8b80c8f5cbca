"""``kubelet announce`` and ``kubelet verify``."""

import asyncio
import io
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from kubelet.cli.announce_once import sign_once
from kubelet.config import NodeConfig, last_issued_file, store
from kubelet.handlers.factory import make_handlers
from kubelet.identity.verification import verify_manifest
from relay.settings.environment import now_ms
from schemas.addresses import BrokerAddress
from schemas.identity_files import IdentityFiles
from schemas.manifest import etag_of
from schemas.process.logs import make_logger
from schemas.trust import TrustedManifest
from tests.fakes.mqtt_listener import MqttListener
from tests.fakes.node import identity_of
from tests.fakes.node_command import (
    CANNOT_RUN,
    CONFIG,
    DAMAGED,
    DONE,
    GARBAGE,
    NO,
    NOWHERE,
    Run,
    everything_in,
)
from tests.fakes.signer import DAY_MS, NODE_ID, SimulatedNode


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
    assert ran.said_in_one_line("`edge-kubelet enroll`, name a --broker HOST:PORT, or use --dry-run")


def test_an_enrolled_node_announces_to_the_broker_of_its_enrolment(
    run: Run, enrolled: IdentityFiles, broker: BrokerAddress
) -> None:
    store(NodeConfig(broker, "http://127.0.0.1:9"), enrolled.root)
    ran = run("announce", "--state-dir", enrolled.root)
    assert (ran.code, ran.out) == (DONE, b"")

    async def retained() -> dict[str, bytes]:
        async with MqttListener(broker, f"$devices/{NODE_ID}/+").listening() as listener:
            messages = [await listener.next(), await listener.next()]
        assert all(message.retained for message in messages)
        return {message.topic.rpartition("/")[2]: message.payload for message in messages}

    kept = asyncio.run(retained())
    assert kept["identity"].decode() == enrolled.read().chain_pem
    assert ran.err.endswith(f"published {etag_of(kept['announce'])}\n")
    assert run("verify", "-", "--state-dir", enrolled.root, stdin=kept["announce"]).code == DONE


@pytest.mark.integration
def test_a_broker_that_takes_nothing_is_a_no(
    run: Run, enrolled: IdentityFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kubelet.cli.announce_once._CONNECT_TIMEOUT_S", 0.05)
    ran = run("announce", "--state-dir", enrolled.root, "--broker", "127.0.0.1:9")
    assert (ran.code, ran.out) == (NO, b"")
    assert ran.err.splitlines()[-1] == "kubelet: the broker at mqtt://127.0.0.1:9 did not take the manifest"


def test_a_dry_run_without_an_identity_is_signed_by_a_throw_away_key_and_says_so(
    run: Run, state: IdentityFiles
) -> None:
    first, second = (run("announce", "--dry-run", "--state-dir", state.root) for _ in range(2))
    assert first.code == DONE
    assert f"there is no identity in {state.root}" in first.err
    assert "throw-away key" in first.err
    assert {capability["kind"] for capability in first.facts["capabilities"]} >= {"system.echo"}
    assert first.facts["node_id"] != second.facts["node_id"]
    assert not state.root.exists()


@pytest.mark.parametrize("left", ["key", "node_id"])
def test_a_dry_run_of_a_damaged_identity_is_refused(run: Run, enrolled: IdentityFiles, left: str) -> None:
    lost = "node_id" if left == "key" else "key"
    getattr(enrolled, lost).unlink()
    ran = run("announce", "--dry-run", "--state-dir", enrolled.root)
    assert (ran.code, ran.out) == (CANNOT_RUN, b"")
    assert ran.said_in_one_line(f"{getattr(enrolled, lost)} is missing")


@pytest.mark.integration
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["announce"], id="announce"),
        pytest.param(["run", *NOWHERE], id="run"),
    ],
)
def test_a_node_that_was_never_made_is_sent_to_init(
    run: Run, state: IdentityFiles, arguments: list[str]
) -> None:
    ran = run(*arguments, "--state-dir", state.root)
    assert (ran.code, ran.out) == (CANNOT_RUN, b"")
    assert ran.said_in_one_line("run `edge-kubelet init`")


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
def test_what_is_no_certificate_proves_nothing(  # noqa: PLR0913, PLR0917 - what it takes to have one
    run: Run, enrolled: IdentityFiles, wire: bytes, tmp_path: Path, option: str, content: bytes
) -> None:
    (tmp_path / "some.pem").write_bytes(content)
    ran = run("verify", "-", option, tmp_path / "some.pem", "--state-dir", enrolled.root, stdin=wire)
    assert ran.code in {NO, CANNOT_RUN}
    assert (ran.out, ran.said_in_one_line("")) == (b"", True)


@pytest.mark.parametrize("file", ["leaf.pem", "root.pem"])
def test_a_stored_certificate_that_is_damaged_proves_nothing(
    run: Run, enrolled: IdentityFiles, wire: bytes, file: str
) -> None:
    (enrolled.root / file).write_bytes(b"\xff")
    ran = run("verify", "-", "--state-dir", enrolled.root, stdin=wire)
    assert (ran.code, ran.said_in_one_line("is damaged: it is not text")) == (CANNOT_RUN, True)


def test_a_stored_root_that_is_not_base64_verifies_nothing(
    run: Run, enrolled: IdentityFiles, wire: bytes
) -> None:
    (enrolled.root / "root.pem").write_text(DAMAGED)
    ran = run("verify", "-", "--state-dir", enrolled.root, stdin=wire)
    assert (ran.code, ran.said_in_one_line("a certificate is not base64")) == (CANNOT_RUN, True)


TTL_MS = 60_000


def test_what_is_signed_by_hand_is_what_the_daemon_would_announce(
    node_of_today: SimulatedNode, tmp_path: Path
) -> None:
    before = now_ms()
    manifest = sign_once(identity_of(node_of_today), tmp_path, TTL_MS, io.StringIO(), remember=False)
    after = now_ms()
    verified = verify_manifest(manifest.wire, node_of_today.leaf_pem, node_of_today.root_pem, after)
    assert isinstance(verified, TrustedManifest)
    announced = [
        handler.capability
        for handler in make_handlers(node_of_today.node_id, make_logger("kubelet", io.StringIO()))
    ]
    assert json.loads(verified.wire)["capabilities"] == announced
    assert before <= manifest.issued_at_ms <= after
    assert manifest.expires_at_ms == manifest.issued_at_ms + TTL_MS


@pytest.mark.parametrize("remember", [True, False])
def test_only_what_is_published_is_remembered(
    node_of_today: SimulatedNode, tmp_path: Path, *, remember: bool
) -> None:
    future = now_ms() + 3_600_000
    last_issued_file(tmp_path).write_text(f"{future}\n")
    manifest = sign_once(identity_of(node_of_today), tmp_path, TTL_MS, io.StringIO(), remember=remember)
    assert (manifest.issued_at_ms == future + 1) is remember
    assert last_issued_file(tmp_path).read_text() == f"{future + remember}\n"
