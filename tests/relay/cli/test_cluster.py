"""`relay cluster` makes what servers and relays need, adds and removes relays, and overwrites nothing."""

import asyncio
import json
import shutil
import stat
import subprocess
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from relay.broker.nats_server import find_nats_server
from relay.cli.state import authority
from relay.state.seal import FleetSeal
from schemas.process.status_socket import served
from tests.fakes.cluster_server import TlsNatsServer
from tests.fakes.command_lines import CommandLines, Ended
from tests.fakes.ports import unused_port
from tests.fakes.relay_command import RelayCommand

THREE = ("--server", "nats-1.example", "--server", "nats-2.example:4333", "--server", "[2001:db8::3]")


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLines:
    return CommandLines(monkeypatch, capsys, {})


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "cluster"


def init(commands: CommandLines, directory: Path, *more: str) -> Ended:
    given = more or ("--server", "nats.example", "--relay", "relay1", "--relay", "relay2")
    return commands.run("relay", "cluster", "init", str(directory), *given)


def facts(ended: Ended) -> Mapping[str, Any]:
    assert ended.code == 0, ended.err
    made: Mapping[str, Any] = json.loads(ended.out)
    return made


def users_in(directory: Path) -> list[str]:
    """Return the users that the first server admits."""
    account = next(directory.glob("servers/*/edge_main.conf")).read_text("utf-8")
    lines = [line.strip(" ,") for line in account.splitlines() if line.startswith("    {")]
    return [json.loads(line)["user"] for line in lines]


def common_name(file: Path) -> str:
    return x509.load_pem_x509_certificate(file.read_bytes()).subject.rfc4514_string()


def test_everything_is_made_and_keys_are_private(commands: CommandLines, directory: Path) -> None:
    made = facts(init(commands, directory, *THREE, "--relay", "relay1", "--relay", "relay2", "--json"))
    assert (made["fleet"], made["account"]) == ("main", "edge_main")
    assert list(made["servers"]) == [
        "tls://nats-1.example:4222",
        "tls://nats-2.example:4333",
        "tls://[2001:db8::3]:4222",
    ]
    assert made["relays"]["relay2"]["run"].startswith(f"relay run --cluster '{','.join(made['servers'])}' ")
    assert f"relay cluster streams {directory}" in made["next"]
    for file in directory.rglob("*"):
        private = file.is_dir() or b"PRIVATE KEY" in file.read_bytes()
        assert stat.S_IMODE(file.stat().st_mode) & 0o077 == 0 if private else True, file
    config = (directory / "servers" / "nats-1.example" / "nats-server.conf").read_text("utf-8")
    assert 'routes: ["nats-route://nats-2.example:6333", "nats-route://[2001:db8::3]:6222"]' in config
    admitted = {common_name(file) for file in directory.rglob("*.pem") if "-root" not in file.name}
    assert set(users_in(directory)) <= admitted
    assert init(commands, directory).code == 3


def test_a_relays_certificate_is_no_servers_and_is_not_admitted_as_one(
    commands: CommandLines, directory: Path
) -> None:
    """Whatever a server admits at the port for other servers has every account."""
    init(commands, directory)
    of_relay, of_server = (
        x509.load_pem_x509_certificate((directory / name).read_bytes())
        for name in ("relays/relay1/cluster.pem", "servers/nats.example/server.pem")
    )
    usages = of_relay.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usages) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    for root, signed, other in (("relays", of_relay, of_server), ("servers", of_server, of_relay)):
        issuer = x509.load_pem_x509_certificate((directory / f"{root}-root.pem").read_bytes())
        signed.verify_directly_issued_by(issuer)
        with pytest.raises(ValueError, match="does not match certificate issuer"):
            other.verify_directly_issued_by(issuer)


@pytest.mark.integration
@pytest.mark.parametrize(
    "servers", [("nats.example",), ("nats-1", "[::1]:4333", "192.0.2.3")], ids=["one", "three"]
)
def test_a_server_accepts_what_is_written_for_it(
    commands: CommandLines, directory: Path, servers: tuple[str, ...]
) -> None:
    given = [word for server in servers for word in ("--server", server)]
    made = facts(init(commands, directory, *given, "--relay", "relay1", "--json"))
    for place in made["servers"].values():
        tried = subprocess.run(
            [str(find_nats_server()), "-t", "-c", "nats-server.conf"],
            cwd=place,
            capture_output=True,
            check=False,
        )
        assert tried.returncode == 0, tried.stderr


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--server", "nats", "--server", "nats-2", "--relay", "a"), "two"),
        (("--server", "nats", "--server", "nats:4222", "--relay", "a"), "--server names nats:4222 twice"),
        (("--server", "nats:70000", "--relay", "a"), "--server is not HOST or HOST:PORT"),
        (("--server", "nats:64000", "--relay", "a"), "at most 63535"),
        (("--server", "u:secret@nats", "--relay", "a"), "--server is not HOST or HOST:PORT"),
        (("--server", "nats\n", "--relay", "a"), "--server is not HOST or HOST:PORT"),
        (("--server", "", "--relay", "a"), "--server is not HOST or HOST:PORT"),
        (("--server", "nats", "--relay", "a", "--relay", "a"), "--relay names a twice"),
        (("--server", "nats", "--relay", "../a"), "--relay is not 1 to 32"),
        (("--server", "nats", "--relay", "A"), "--relay is not 1 to 32"),
        (("--server", "nats", "--relay", "a" * 33), "--relay is not 1 to 32"),
        (("--server", "nats", "--relay", ""), "--relay is not 1 to 32"),
        (("--server", "nats", "--relay", "administrator"), "--relay administrator is there already"),
        (("--server", "nats", "--relay", "a", "--fleet", "x y"), "--fleet is not 1 to 32"),
        (("--server", "nats"), "--relay"),
        (("--relay", "a"), "--server"),
    ],
)
def test_what_is_not_of_its_form_is_one_line_and_makes_nothing(
    commands: CommandLines, directory: Path, given: tuple[str, ...], said: str
) -> None:
    ended = init(commands, directory, *given)
    assert (ended.code, ended.out) == (2, "")
    assert said in ended.err
    assert ended.err.count("\n") == 1
    assert "secret" not in ended.err
    assert not directory.exists()


def test_a_relay_is_added_and_removed_and_its_name_admits_no_former_certificate(
    commands: CommandLines, directory: Path
) -> None:
    init(commands, directory)
    stolen = common_name(directory / "relays" / "relay2" / "cluster.pem")
    assert stolen in users_in(directory)
    again = commands.run("relay", "cluster", "add", str(directory), "relay2")
    assert (again.code, "relay2 is there already" in again.err) == (2, True)

    removed = commands.run("relay", "cluster", "remove", str(directory), "relay2")
    assert removed.code == 0
    assert f"copy {directory}/servers/nats.example/edge_main.conf to its server" in removed.out
    assert stolen not in users_in(directory)
    added = facts(commands.run("relay", "cluster", "add", str(directory), "relay2", "relay3", "--json"))
    assert list(added["relays"]) == ["relay1", "relay2", "relay3"]
    assert len(added["next"]) == 3
    admitted = users_in(directory)
    assert stolen not in admitted
    for name in added["relays"]:
        assert common_name(directory / "relays" / name / "cluster.pem") in admitted
    unknown = commands.run("relay", "cluster", "remove", str(directory), "relay9")
    assert (unknown.code, "relay9 is none of its relays: relay1, relay2, relay3" in unknown.err) == (2, True)


def test_renewed_certificates_are_of_the_same_users(commands: CommandLines, directory: Path) -> None:
    init(commands, directory)
    before, users = (directory / "relays/relay1/cluster.pem").read_bytes(), users_in(directory)
    assert commands.run("relay", "cluster", "renew", str(directory)).code == 0
    assert (directory / "relays/relay1/cluster.pem").read_bytes() != before
    assert users_in(directory) == users


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"fleet": 1, "servers": ["a"], "users": {}}',
        '{"fleet": "main", "servers": "a", "users": {"../x": "x"}}',
        '{"fleet": "main", "servers": ["a b"], "users": {}}',
        '{"fleet": "main", "servers": ["a"], "users": {"relay1": 5}}',
        '{"fleet": "main", "servers": ["a"], "users": {"relay1": "x"}}',
        '{"fleet": "main", "servers": [], "users": {"administrator": "x"}}',
    ],
)
def test_a_directory_that_is_damaged_is_said_in_one_line(
    commands: CommandLines, directory: Path, text: str
) -> None:
    init(commands, directory)
    (directory / "cluster.json").write_text(text, "utf-8")
    for command in (("add", "relay3"), ("remove", "relay1"), ("renew",), ("streams",)):
        ended = commands.run("relay", "cluster", command[0], str(directory), *command[1:])
        assert (ended.code, ended.out) == (3, ""), command
        assert (
            ended.err == f"relay: {directory}/cluster.json is damaged: restore the directory from its copy\n"
        )


def test_a_directory_that_was_not_made_is_named(commands: CommandLines, directory: Path) -> None:
    ended = commands.run("relay", "cluster", "streams", str(directory))
    assert ended == Ended(3, "", f"relay: {directory}/cluster.json: No such file or directory\n")


@pytest.mark.integration
def test_streams_are_made_once_and_what_was_changed_is_refused(
    commands: CommandLines, tmp_path: Path
) -> None:
    server = TlsNatsServer(tmp_path)
    made = str(tmp_path / "cluster")
    away = commands.run("relay", "cluster", "streams", made)
    assert (away.code, away.err) == (3, f"relay: tls://{server.address}: Connection refused\n")
    server.start_empty()
    try:
        first, second = (facts(commands.run("relay", "cluster", "streams", made, "--json")) for _ in range(2))
        names = ("edge_main_ledger", "KV_edge_main_presence")
        assert first["streams"] == dict.fromkeys(names, "made")
        assert second["streams"] == dict.fromkeys(names, "is there")
    finally:
        server.stop()
    shutil.rmtree(server.directory / "store")


def test_the_ports_of_a_server_are_two(commands: CommandLines, directory: Path) -> None:
    port = unused_port()
    servers = [word for host in "abc" for word in ("--server", f"{host}:{port}")]
    init(commands, directory, *servers, "--relay", "x")
    text = (directory / "servers" / f"a-{port}" / "nats-server.conf").read_text("utf-8")
    assert f'listen: "0.0.0.0:{port}"' in text
    assert f'listen: "0.0.0.0:{port + 2000}"' in text


# --- relay cluster seal

NAMED = "edge-relay-0123456789abcdef"
OTHER = {"relay": "01HZX9K3M4P7Q8R9S0T1V2W3XB", "version": "0.3.0"}
JOINED = {"cluster": {"name": NAMED, "others": [OTHER | {"name": NAMED}]}}


@pytest.mark.integration
@pytest.mark.parametrize(
    ("status", "given", "code", "text"),
    [
        ({}, ("--yes",), 3, "in no fleet of several"),
        ({"cluster": {"name": "", "others": []}}, ("--yes",), 3, "no certificate to seal with: start it"),
        ({"cluster": {"name": NAMED, "others": [OTHER]}}, ("--yes",), 3, f"relay {OTHER['relay']} has no"),
        (JOINED, (), 2, "say --yes"),
        (None, ("--yes",), 3, "nothing runs with"),
    ],
    ids=["alone", "without a certificate", "an older relay", "not sure", "not running"],
)
async def test_a_fleet_is_not_sealed_that_cannot_be(  # noqa: PLR0913, PLR0917 - one row of the table
    relay: RelayCommand,
    state: Path,
    status: Mapping[str, Any] | None,
    given: tuple[str, ...],
    code: int,
    text: str,
) -> None:
    async with AsyncExitStack() as stack:
        if status is not None:
            await stack.enter_async_context(served(state, lambda: status or {}))
        outcome = await asyncio.to_thread(relay, "cluster", "seal", *given)
    assert outcome.code == code, outcome
    assert text in outcome.err
    assert not FleetSeal(state / "cluster_seal.jsonl", authority(state)).is_sealed()


@pytest.mark.integration
async def test_a_fleet_is_sealed_once_and_without_the_cas_key_not_at_all(
    relay: RelayCommand, state: Path
) -> None:
    key = state / "ca" / "root.key"
    async with served(state, lambda: JOINED):
        await asyncio.to_thread(key.rename, state / "away")
        refused = await asyncio.to_thread(relay, "cluster", "seal", "--yes")
        assert (refused.code, "CA's key is not here" in refused.err) == (3, True)
        await asyncio.to_thread((state / "away").rename, key)
        sealed = await asyncio.to_thread(relay, "cluster", "seal", "--yes", "--json")
        assert (sealed.code, json.loads(sealed.out)) == (0, {"sealed": True})
    written = await asyncio.to_thread((state / "cluster_seal.jsonl").read_text)
    # Again it changes nothing, and needs no relay that runs.
    assert (await asyncio.to_thread(relay, "cluster", "seal")).code == 0
    assert await asyncio.to_thread((state / "cluster_seal.jsonl").read_text) == written
