"""Which ports the relay's broker can take, and whether it listens. Must not hold one: the broker binds it."""

import socket
from contextlib import suppress
from pathlib import Path

from schemas.addresses import HostPort
from schemas.error_roots import OperatorError

_TRIED = 100
_LISTEN = "0A"  # the state, as /proc/PID/net/tcp has it


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
