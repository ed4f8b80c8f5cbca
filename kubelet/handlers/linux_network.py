"""``linux.network``: interfaces, routes, resolvers, and the ports that are listened on.

Must not send a packet: whether the gateway answers is what the neighbour table says.
"""

import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, NamedTuple

import psutil

from kubelet.handlers.base import HandlerFactory
from kubelet.handlers.machine import LinuxHandler, LinuxMachine

_MOST_INTERFACES, _MOST_ADDRESSES, _MOST_ROUTES, _MOST_RESOLVERS, _MOST_PORTS = 64, 16, 64, 8, 128
LISTENING_S = 8.0
"""Of a slow board with thousands of processes."""
_ADDRESS = re.compile(r"[0-9a-fA-F:.]{1,64}(%[A-Za-z0-9._-]{1,15})?")
_COUNTERS = ("rx_bytes", "tx_bytes", "rx_errors", "tx_errors", "rx_dropped", "tx_dropped")
_UP = 1  # IFF_UP of the flags
_ROUTE_IS_UP, _REJECTS = 0x1, 0x200
_NO_INTERFACE = "*"
_COMPLETE = 0x2  # ATF_COM of a neighbour


class Route(NamedTuple):
    """One route; ``gateway`` is None on the link itself."""

    destination: str
    gateway: str | None
    interface: str
    metric: int


def routes(machine: LinuxMachine) -> list[Route]:
    """Return the routes of IPv4 and IPv6 that are in use, those of the loopback interface left out."""
    found = [*_routes_4(machine), *_routes_6(machine)]
    return [route for route in found if route.interface != "lo"]


def resolvers(machine: LinuxMachine) -> list[str]:
    """Return the addresses that names are asked of."""
    lines = (line.split() for line in (machine.text("/etc/resolv.conf") or "").splitlines())
    named = [words[1] for words in lines if len(words) > 1 and words[0] == "nameserver"]
    return [address for address in named if _ADDRESS.fullmatch(address)][:_MOST_RESOLVERS]


def interfaces(machine: LinuxMachine) -> list[str]:
    """Return the names of the interfaces, without the loopback interface."""
    found = machine.matching("/sys/class/net", "*")
    # A file there lists the bonds.
    return [each.name for each in found if each.name != "lo" and each.is_dir()]


def link_changes(machine: LinuxMachine, interface: str) -> int | None:
    """Return how often the carrier of ``interface`` came or went since the boot."""
    return machine.number(f"/sys/class/net/{interface}/carrier_changes")


def _routes_4(machine: LinuxMachine) -> Iterator[Route]:
    for line in (machine.text("/proc/net/route") or "").splitlines()[1:]:
        columns = line.split()
        with suppress(IndexError, ValueError):
            # What is unreachable, prohibited or dropped has no interface; the last is not marked otherwise.
            if int(columns[3], 16) & _ROUTE_IS_UP and columns[0] != _NO_INTERFACE:
                mask = int(columns[7], 16).bit_count()
                destination = f"{_ip_4(columns[1])}/{mask}" if mask else "default"
                gateway = None if not int(columns[2], 16) else _ip_4(columns[2])
                yield Route(destination, gateway, columns[0], int(columns[6]))


def _routes_6(machine: LinuxMachine) -> Iterator[Route]:
    for line in (machine.text("/proc/net/ipv6_route") or "").splitlines():
        columns = line.split()
        with suppress(IndexError, ValueError):
            flags, length = int(columns[8], 16), int(columns[1], 16)
            # Addresses of the machine itself stand here too, as routes of a single address.
            if flags & _ROUTE_IS_UP and not flags & _REJECTS and length < 128:  # noqa: PLR2004 - bits
                destination = f"{_ip_6(columns[0])}/{length}" if length else "default"
                gateway = None if not int(columns[4], 16) else _ip_6(columns[4])
                yield Route(destination, gateway, columns[9], int(columns[5], 16))


def _ip_4(little_endian: str) -> str:
    return socket.inet_ntop(socket.AF_INET, bytes.fromhex(little_endian)[::-1])


def _ip_6(digits: str) -> str:
    return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))


class NetworkHandler(LinuxHandler):
    """Answers with what the kernel knows of the network."""

    @property
    def lacks(self) -> str | None:
        """That the kernel is not asked for addresses."""
        try:
            socket.socket(socket.AF_NETLINK, socket.SOCK_RAW).close()
        except OSError:
            return "addresses are not seen: the unit's RestrictAddressFamilies= lacks AF_NETLINK"
        return None

    async def snapshot(self, arguments: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002 - takes none
        """Return all of it. Whose ports they are is read from every process, so on a thread.

        The thread is of its own: a process that hangs in the kernel may hold what reads its name.

        Raises:
            ToolFault: ``no_answer``.
        """
        addresses, names = _addresses(), interfaces(self.machine)
        allowed = [name for name in names if self.allows("interfaces", name)]
        known = [route for route in routes(self.machine) if self.allows("interfaces", route.interface)]
        listening = await self.calls.run(_listening, LISTENING_S)
        if self.ceiling.of("linux.network").restricts("interfaces"):
            # Of an address that no allowed interface is known to have, the owner may not allow it.
            inside = {_ip(each) for name in allowed for each in addresses.get(name, ())}
            listening = [
                each
                for each in listening
                if (ip := _ip(each["address"])) in inside or ip.is_unspecified or ip.is_loopback
            ]
        return {
            "interfaces": self._interfaces(allowed, addresses),
            "withheld": len(names) - len(allowed),
            "routes": [route._asdict() for route in known[:_MOST_ROUTES]],
            "resolvers": resolvers(self.machine),
            "gateway": self._gateway(known),
            "listening": listening,
        }

    def _interfaces(
        self, names: Sequence[str], addresses: Mapping[str, Sequence[str]]
    ) -> list[dict[str, Any]]:
        machine = self.machine
        shown = []
        for name in names[:_MOST_INTERFACES]:
            where = f"/sys/class/net/{name}"
            flags, carrier = machine.text(f"{where}/flags") or "0", machine.number(f"{where}/carrier")
            speed = machine.number(f"{where}/speed")
            shown.append(
                {
                    "name": name,
                    "up": bool(int(flags, 16) & _UP),
                    "link": None if carrier is None else carrier == 1,
                    "addresses": addresses.get(name, [])[:_MOST_ADDRESSES],
                    # The kernel states -1 where there is no link.
                    "speed_mbps": speed if speed is not None and speed > 0 else None,
                    "mtu": machine.number(f"{where}/mtu"),
                    "link_changes": link_changes(machine, name),
                    **{each: machine.number(f"{where}/statistics/{each}") or 0 for each in _COUNTERS},
                }
            )
        return shown

    def _gateway(self, known: list[Route]) -> str:
        # Of IPv4 alone, as the table is.
        default = [each for each in known if each.destination == "default" and "." in (each.gateway or "")]
        gateways = [each.gateway for each in sorted(default, key=lambda each: each.metric)]
        for line in (self.machine.text("/proc/net/arp") or "").splitlines()[1:]:
            columns = line.split()
            if gateways and columns and columns[0] == gateways[0]:
                with suppress(IndexError, ValueError):
                    return "reachable" if int(columns[2], 16) & _COMPLETE else "incomplete"
        return "unknown"


def _addresses() -> dict[str, list[str]]:
    """Return the addresses of each interface; none where the system does not let this process ask.

    Without zones, which are the interface's name and may have characters that the document does not admit.
    """
    shown: dict[str, list[str]] = {}
    with suppress(OSError, UnicodeDecodeError):  # psutil decodes all names strictly
        for name, entries in psutil.net_if_addrs().items():
            ip = [each for each in entries if each.family in (socket.AF_INET, socket.AF_INET6)]
            # An address with a label of its own (eth0:1) is of the interface all the same.
            known = shown.setdefault(name.partition(":")[0], [])
            known += [f"{each.address.partition('%')[0]}{_length(each.netmask)}" for each in ip]
    return shown


def _ip(address: str) -> IPv4Address | IPv6Address:
    """Return ``address`` without zone and length, and one of IPv4 as that.

    >>> _ip("fe80::1%wlan0/64"), _ip("::ffff:192.0.2.1")
    (IPv6Address('fe80::1'), IPv4Address('192.0.2.1'))
    """
    ip = ip_address(address.partition("/")[0].partition("%")[0])
    return (ip.version == 6 and ip.ipv4_mapped) or ip  # noqa: PLR2004 - of IP


def _length(netmask: str | None) -> str:
    if not netmask:
        return ""
    family = socket.AF_INET6 if ":" in netmask else socket.AF_INET
    return f"/{int.from_bytes(socket.inet_pton(family, netmask)).bit_count()}"


def _listening() -> list[dict[str, Any]]:
    try:
        sockets = psutil.net_connections("inet")
    except (OSError, psutil.Error):
        return []
    found = set()
    for each in sockets:
        protocol = "tcp" if each.type == socket.SOCK_STREAM else "udp"
        if each.laddr and (each.status == psutil.CONN_LISTEN or (protocol == "udp" and not each.raddr)):
            found.add((protocol, each.laddr.ip, each.laddr.port, each.pid or 0))
    names = {pid: _process(pid) for *_, pid in found}
    return [
        {"protocol": protocol, "address": ip, "port": port, "process": names[pid]}
        for protocol, ip, port, pid in sorted(found)[:_MOST_PORTS]
    ]


def _process(pid: int) -> str | None:
    if not pid:
        return None
    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:
        return None


HANDLER: HandlerFactory = NetworkHandler
