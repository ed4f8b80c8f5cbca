"""``relay cluster``: what an administrator of the nats-servers that join the relays of a fleet needs.

And `relay cluster seal`, by which the operator of the relays has them believe those servers nothing.

All of it is in one directory, which stays with the administrator: the roots of the servers' and of the
relays' certificates with their keys, and for each machine a directory that is copied there; ``cluster.json``
says what was made. Must not reach a relay, nor use the CA of the nodes: no node is a user of these servers.
"""

import asyncio
import json
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from nacl.signing import SigningKey

from relay.cli.exits import fail
from relay.cli.options import AsJson, StateDir, answer, state_files
from relay.cli.state import authority
from relay.cluster.server_config import Routes, account_file, account_text, server_text
from relay.pki.issuing import issue_client, issue_server, make_root
from relay.pki.roots import make_server_key, server_key_to_pem
from relay.settings.config import ClusterConfig, ClusterServer, account_of
from relay.settings.environment import now_ms
from relay.settings.table import CLUSTER_FLEET, fleet_name, parse_server
from relay.state.seal import FleetSeal
from schemas.addresses import HostPort, is_loopback
from schemas.error_roots import CommandLineError, EdgeError, StateError
from schemas.files import PRIVATE, make_private_directory, read_named, read_named_private, write_atomic
from schemas.identity import MAX_PEM_BYTES
from schemas.keys import private_key_from_pem, private_key_to_pem
from schemas.process.cli_manual import example, group
from schemas.process.command_errors import EXIT_CANNOT_RUN, EXIT_USAGE
from schemas.process.status_socket import read_status
from schemas.strict_json import StrictJsonError, loads
from schemas.text import counted

app = group("The nats-servers that join several relays of one fleet, for their administrator.")

_ROUTES_ABOVE = 2000
"""How much higher than its clients' port a server's port for the other servers is."""
_USUAL_PORT, _MAX_PORT = 4222, 65535
_ROOT_DAYS, _VALID_DAYS = 3650, 730
_ADMINISTRATOR = "administrator"
_WITHIN_S = 30.0
_RELAYS, _SERVERS = "relays", "servers"
_MADE = "cluster.json"
_MAX_MADE_BYTES = 65_536
_ID_BYTES = 4
_TWO = 2

Directory = Annotated[Path, typer.Argument(metavar="DIRECTORY", help="Where all of it is.")]
Names = Annotated[list[str], typer.Argument(metavar="NAME...", help="Of relays.")]


@dataclass(frozen=True, slots=True)
class Setup:
    """What was made.

    Attributes:
        servers: each as HOST:PORT.
        users: the common name of each user's certificate, by the name of the relay.
    """

    fleet: str
    servers: Sequence[str]
    users: Mapping[str, str]

    @property
    def relays(self) -> list[str]:
        return [name for name in self.users if name != _ADMINISTRATOR]

    @property
    def addresses(self) -> list[ClusterServer]:
        return [parse_server(f"tls://{each}") for each in self.servers]


@app.command(epilog=example("relay cluster init cluster --server nats.example --relay relay1"))
def init(
    directory: Directory,
    server: Annotated[
        list[str],
        typer.Option("--server", metavar="HOST[:PORT]", help="A nats-server: one, or three or more."),
    ],
    relay: Annotated[
        list[str], typer.Option("--relay", metavar="NAME", help="A relay. Others can be added.")
    ],
    fleet: Annotated[str, typer.Option(metavar="NAME", help="The name of the fleet.")] = "main",
    as_json: AsJson = False,
) -> None:
    """Make the account of a fleet, its users, and what servers and relays need. Nothing is overwritten."""
    setup = set_up(directory, server, relay, fleet)
    servers, relays = counted(len(setup.servers), "server"), counted(len(setup.relays), "relay")
    note = f"{directory} has the account {account_of(setup.fleet)}, {servers}, {relays}"
    _show(directory, setup, note, _to_do(directory, setup), as_json=as_json)


def set_up(directory: Path, servers: Sequence[str], relays: Sequence[str], fleet: str) -> Setup:
    """Make in ``directory`` what ``servers`` and ``relays`` of ``fleet`` need; return what was made.

    Raises:
        CommandLineError: one of them is not of its form.
        StateError: there is something in the directory.
    """
    named = [str(HostPort(each.host, each.port)) for each in map(_server, servers)]
    _check_distinct("--server", named)
    if len(named) == _TWO:
        raise CommandLineError(
            "--server is given twice: of two none could go on without the other: name one or three"
        )
    setup = Setup(_of_form("--fleet", fleet), named, {_ADMINISTRATOR: _new_common_name(_ADMINISTRATOR)})
    setup = _with_relays(setup, relays, "--relay")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise StateError(f"{directory} is there, and nothing is overwritten: name a directory that is not")
    make_private_directory(directory)
    for root in (_RELAYS, _SERVERS):
        key = SigningKey(os.urandom(32))
        name = f"edge-kubelet cluster {setup.fleet} {root}"
        write_atomic(directory / f"{root}-root.key", private_key_to_pem(key), PRIVATE)
        write_atomic(directory / f"{root}-root.pem", make_root(key, name, now_ms(), _ROOT_DAYS, _serial()))
    _write_servers(directory, setup)
    for name in setup.users:
        _write_user(directory, setup, name)
    _write_made(directory, setup)
    return setup


@app.command(epilog=example("relay cluster add cluster relay-3"))
def add(directory: Directory, name: Names, as_json: AsJson = False) -> None:
    """Add relays: a user and a certificate for each. None is overwritten."""
    before = _read_made(directory)
    setup = _with_relays(before, name, "NAME")
    for each in name:
        _write_user(directory, setup, each)
    _change(directory, setup, name, f"added: {', '.join(name)}", as_json=as_json)


@app.command(epilog=example("relay cluster remove cluster relay-3"))
def remove(directory: Directory, name: Names, as_json: AsJson = False) -> None:
    """Remove relays. Their certificates are good for nothing any more, also if the name is given again."""
    before = _read_made(directory)
    if unknown := [each for each in name if each not in before.relays]:
        raise CommandLineError(f"{', '.join(unknown)} is none of its relays: {', '.join(before.relays)}")
    setup = replace(before, users={each: user for each, user in before.users.items() if each not in name})
    _change(directory, setup, (), f"removed: {', '.join(name)}", as_json=as_json)
    for each in name:
        for file in (directory / _RELAYS / each).glob("*.pem"):
            file.unlink()


@app.command(epilog=example("relay cluster renew cluster"))
def renew(directory: Directory, as_json: AsJson = False) -> None:
    """Replace all certificates and their keys before they expire. The former ones stay good until then."""
    setup = _read_made(directory)
    _write_servers(directory, setup)
    for each in setup.users:
        _write_user(directory, setup, each)
    note = "copy all of it again; servers read theirs when they are reloaded, and relays with each connection"
    _show(directory, setup, note, _to_do(directory, setup), as_json=as_json)


@app.command(epilog=example("relay cluster streams cluster"))
def streams(directory: Directory, as_json: AsJson = False) -> None:
    """Make the stream and the bucket of the fleet on the servers, or see that they are there."""
    setup = _read_made(directory)
    try:
        done = asyncio.run(_streams(directory, setup))
    except ModuleNotFoundError as error:
        raise StateError(
            f"{error.name} is not installed: install the extra 'cluster' (docs/install.md)"
        ) from None
    note = "\n".join(f"{name}  {what}" for name, what in done.items())
    _show(directory, setup, note, _relays_to_run(setup, setup.relays), as_json=as_json, streams=done)


async def _streams(directory: Path, setup: Setup) -> Mapping[str, str]:
    from relay.cluster.client import administering  # noqa: PLC0415 - an option's library
    from relay.cluster.credentials import read_credentials  # noqa: PLC0415 - as above
    from relay.cluster.jetstream import COPIES, make_streams  # noqa: PLC0415 - as above

    files = directory / f"{_ADMINISTRATOR}.pem", directory / f"{_SERVERS}-root.pem"
    servers = setup.addresses
    config = ClusterConfig(tuple(servers), *files, setup.fleet, account_of(setup.fleet))
    async with administering(servers, read_credentials(config)) as client:
        return await make_streams(client, setup.fleet, min(len(servers), COPIES), _WITHIN_S)


# --- What is given


def _server(text: str) -> ClusterServer:
    try:
        server = parse_server(f"tls://{text}")
    except EdgeError:
        raise CommandLineError("--server is not HOST or HOST:PORT, for example nats-1.example") from None
    if server.port + _ROUTES_ABOVE > _MAX_PORT:
        raise CommandLineError(
            f"--server has port {server.port}: at most {_MAX_PORT - _ROUTES_ABOVE}, since servers reach each "
            f"other at one that is {_ROUTES_ABOVE} higher"
        )
    return server


def _of_form(option: str, text: str) -> str:
    try:
        return fleet_name(text)
    except EdgeError as error:
        raise CommandLineError(f"{option} {error}") from None


def _check_distinct(option: str, given: Sequence[str]) -> None:
    if twice := next((each for each in given if given.count(each) > 1), None):
        raise CommandLineError(f"{option} names {twice} twice")


def _with_relays(setup: Setup, names: Sequence[str], option: str) -> Setup:
    _check_distinct(option, [_of_form(option, name) for name in names])
    if taken := next((name for name in names if name in setup.users), None):
        raise CommandLineError(f"{option} {taken} is there already: choose another, or remove it first")
    return replace(setup, users={**setup.users, **{name: _new_common_name(name) for name in names}})


def _new_common_name(name: str) -> str:
    """Return a name that no certificate had: one of a relay that was removed must not be admitted again."""
    return f"{name}.{os.urandom(_ID_BYTES).hex()}"


# --- What is written


def _read_made(directory: Path) -> Setup:
    file = directory / _MADE
    try:
        made: Any = loads(read_named(file, _MAX_MADE_BYTES), max_bytes=_MAX_MADE_BYTES)
        setup = Setup(made["fleet"], made["servers"], made["users"])
        for name in (setup.fleet, *setup.users):
            fleet_name(name)
        all_read = bool(setup.addresses and setup.users[_ADMINISTRATOR])
        all_read &= all(isinstance(each, str) for each in setup.users.values())
    except (StrictJsonError, LookupError, TypeError, AttributeError, EdgeError):
        all_read = False
    if not all_read:
        raise StateError(f"{file} is damaged: restore the directory from its copy")
    return setup


def _write_made(directory: Path, setup: Setup) -> None:
    write_atomic(directory / _MADE, json.dumps(asdict(setup), indent=2) + "\n")
    account = account_of(setup.fleet)
    users = {name: {"user": f"CN={common_name}"} for name, common_name in setup.users.items()}
    administrator = users.pop(_ADMINISTRATOR)
    text = account_text(account, setup.fleet, administrator, list(users.values()))
    for server in setup.addresses:
        write_atomic(directory_of(directory, server) / account_file(account), text)


def directory_of(directory: Path, server: ClusterServer) -> Path:
    """Return where the files of ``server`` are."""
    name = server.host if server.port == _USUAL_PORT else f"{server.host}-{server.port}"
    return directory / _SERVERS / name.replace(":", "_")


def _write_servers(directory: Path, setup: Setup) -> None:
    addresses = {server: HostPort(server.host, server.port + _ROUTES_ABOVE) for server in setup.addresses}
    root, key = _root(directory, _SERVERS)
    for server, route in addresses.items():
        place = directory_of(directory, server)
        make_private_directory(place)
        own = make_server_key(os.urandom)
        certificate = issue_server(
            root,
            key,
            name=server.host,
            hosts=[server.host],
            public_key=own.public_key(),
            now_ms=now_ms(),
            valid_days=_VALID_DAYS,
            serial=_serial(),
            is_client_too=True,
        )
        write_atomic(place / "server.key", server_key_to_pem(own), PRIVATE)
        write_atomic(place / "server.pem", certificate)
        for each in (_RELAYS, _SERVERS):
            write_atomic(place / f"{each}-root.pem", _root_pem(directory, each))
        routes = None
        if len(addresses) > 1:
            others = [address for other, address in addresses.items() if other != server]
            routes = Routes(f"edge-{setup.fleet}", _listening(route), others)
        listen = _listening(HostPort(server.host, server.port))
        text = server_text(place.name, listen, account_of(setup.fleet), tls=True, routes=routes)
        write_atomic(place / "nats-server.conf", text)


def _listening(address: HostPort) -> HostPort:
    """Return where a server listens that others reach at ``address``."""
    if is_loopback(address.host):
        return address
    return HostPort("::" if ":" in address.host else "0.0.0.0", address.port)  # noqa: S104 - who it admits says its file


def _write_user(directory: Path, setup: Setup, name: str) -> None:
    root, root_key = _root(directory, _RELAYS)
    key = SigningKey(os.urandom(32))
    certificate = issue_client(
        root,
        root_key,
        name=setup.users[name],
        uri=f"urn:edge-kubelet:cluster:{setup.fleet}:{name}",
        public_key=bytes(key.verify_key),
        now_ms=now_ms(),
        valid_days=_VALID_DAYS,
        serial=_serial(),
    )
    file = directory / f"{_ADMINISTRATOR}.pem"
    if name != _ADMINISTRATOR:
        file = directory / _RELAYS / name / "cluster.pem"
        make_private_directory(file.parent)
        write_atomic(file.parent / "cluster-root.pem", _root_pem(directory, _SERVERS))
    write_atomic(file, certificate + private_key_to_pem(key), PRIVATE)


def _root(directory: Path, which: str) -> tuple[str, SigningKey]:
    key = read_named_private(directory / f"{which}-root.key", MAX_PEM_BYTES).decode("ascii", "replace")
    return _root_pem(directory, which), private_key_from_pem(key)


def _root_pem(directory: Path, which: str) -> str:
    return read_named(directory / f"{which}-root.pem", MAX_PEM_BYTES).decode("ascii", "replace")


def _serial() -> int:
    return int.from_bytes(os.urandom(16), "big") | 1


# --- What is shown


def _change(directory: Path, setup: Setup, new: Sequence[str], note: str, *, as_json: bool) -> None:
    _write_made(directory, setup)
    account = account_file(account_of(setup.fleet))
    to_do = [
        f"copy {place / account} to its server, and: nats-server --signal reload"
        for place in _places(directory, setup)
    ]
    _show(directory, setup, note, [*to_do, *_relays_to_run(setup, new)], as_json=as_json)


def _places(directory: Path, setup: Setup) -> list[Path]:
    return [directory_of(directory, server) for server in setup.addresses]


def _to_do(directory: Path, setup: Setup) -> Iterator[str]:
    for place in _places(directory, setup):
        yield f"copy {place} to its server, and run in that directory: nats-server -c nats-server.conf"
    yield f"relay cluster streams {shlex.quote(str(directory))}"
    yield from _relays_to_run(setup, setup.relays)


def _relays_to_run(setup: Setup, names: Sequence[str]) -> Iterator[str]:
    for name in names:
        yield f"copy {_RELAYS}/{name} to the machine of {name}, and there: {run_command(setup, name)}"


def run_command(setup: Setup, name: str) -> str:
    """Return how the relay ``name`` is run, beside what it is given else."""
    words = ["relay", "run", "--cluster", ",".join(map(str, setup.addresses))]
    words += ["--cluster-credentials", f"{name}/cluster.pem", "--cluster-root", f"{name}/cluster-root.pem"]
    if setup.fleet != CLUSTER_FLEET.default:
        words += ["--cluster-fleet", setup.fleet]
    return shlex.join(words)


def _show(
    directory: Path,
    setup: Setup,
    note: str,
    to_do: Iterable[str],
    *,
    as_json: bool,
    **more: Mapping[str, str],
) -> None:
    steps = list(to_do)
    facts = {
        "directory": str(directory),
        "fleet": setup.fleet,
        "account": account_of(setup.fleet),
        "servers": {
            str(server): str(place)
            for server, place in zip(setup.addresses, _places(directory, setup), strict=True)
        },
        "relays": {
            name: {"directory": str(directory / _RELAYS / name), "run": run_command(setup, name)}
            for name in setup.relays
        },
        "next": steps,
        **more,
    }
    numbered = "\n".join(f"{number}. {step}" for number, step in enumerate(steps, 1))
    answer(facts, as_json=as_json, note=note, result=f"Next:\n{numbered}" if steps else "")


@app.command(epilog=example("relay cluster seal --yes"))
def seal(
    yes: Annotated[bool, typer.Option("--yes", help="Yes, although it cannot be taken back.")] = False,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Have all relays seal what they say to each other, and take nothing else: for good.

    On the relay with the CA's key, while all relays of the fleet run.
    """
    state = state_files(state_dir)
    fleet = FleetSeal(state.cluster_seal, authority(state_dir))
    if not fleet.is_sealed():
        _check_sealable(read_status(state.root).get("cluster"))
        if not yes:
            fail("it cannot be taken back: say --yes", EXIT_USAGE)
        if not fleet.seal(now_ms()):
            fail("the CA's key is not here: run it on the relay that has it", EXIT_CANNOT_RUN)
    answer({"sealed": True}, as_json=as_json, note="the relays seal what they say to each other")


def _check_sealable(cluster: Mapping[str, Any] | None) -> None:
    """Return if the relays of the fleet that run, of which ``cluster`` is the status, can seal.

    Raises:
        StateError: one cannot, or this relay is in no fleet.
    """
    if cluster is None:
        raise StateError("this relay is in no fleet of several: it runs without --cluster")
    if not cluster.get("name"):
        raise StateError("this relay has no certificate to seal with: start it again")
    for other in cluster["others"]:
        if not other.get("name"):
            raise StateError(
                f"relay {other['relay']} has no certificate that was heard of here: if it has just started, "
                "try again; else upgrade it, and start it from another `relay ca backup --without-ca-key`"
            )
