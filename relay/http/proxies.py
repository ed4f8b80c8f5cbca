"""Whose requests a proxy forwards: by ``X-Forwarded-For``, or by the PROXY protocol where it passes TLS on.

What a peer says of addresses counts only if it is one of ``trusted_proxies``: everyone can write a header.
Must not decide what an address may do.
"""

import asyncio
import socket
from collections.abc import Iterable, Sequence
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

from attrs import define

from schemas.error_roots import PeerError

Network = IPv4Network | IPv6Network

_MAX_HOPS = 16
"""More proxies than there are in front of any relay."""
_MAX_ADDRESS = 64
_PORT_MARKS = 1
_SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"
_FIXED_BYTES = 16
_MAX_REST_BYTES = 1024
"""Addresses take 36 bytes; what else a proxy adds, as the name that TLS asks for, some hundred."""
_LOCAL, _FORWARDED = 0x20, 0x21
_ADDRESS_BYTES = {0x11: 4, 0x21: 16}
"""Of a source address, by family and transport: TCP over IPv4 or IPv6. The destination and ports follow."""
_PORT_BYTES = 2


class ProxyHeaderError(PeerError):
    """What a trusted proxy sent before the connection itself is no header of version 2."""


@define(eq=False, repr=False)
class TrustedProxies:
    """The proxies that the operator trusts to say whom they forward."""

    _networks: Sequence[Network] = ()

    def trusts(self, address: str) -> bool:
        return bool(self._networks) and (found := _parsed(address)) is not None and self._contain(found)

    def client_of(self, peer: str, forwarded_for: Iterable[bytes]) -> str:
        """Return who sent a request that ``peer`` forwards, by the values of its X-Forwarded-For.

        From the right, where the nearest proxy has added its own peer: the first that is not trusted. Before
        it, anyone may have written anything. What is no address ends the search at the proxy that added it.
        """
        client = peer
        hops = b",".join(forwarded_for).rsplit(b",", _MAX_HOPS)
        for hop in reversed(hops[-_MAX_HOPS:]):
            if (found := _parsed(_without_port(hop.strip(b" \t").decode("latin-1")))) is None:
                break
            client = str(found)
            if not self._contain(found):
                break
        return client

    def _contain(self, address: IPv4Address | IPv6Address) -> bool:
        return any(address in network for network in self._networks)


def _without_port(hop: str) -> str:
    """Return the address of ``ADDRESS``, ``IPV4:PORT`` or ``[IPV6]:PORT``, as some proxies write it."""
    if hop.startswith("["):
        return hop[1:].partition("]")[0]
    return hop.partition(":")[0] if hop.count(":") == _PORT_MARKS else hop


@lru_cache(maxsize=4096)
def _parsed(address: str) -> IPv4Address | IPv6Address | None:
    if len(address) > _MAX_ADDRESS:
        return None
    try:
        ip = ip_address(address.partition("%")[0])
    except ValueError:
        return None
    return (ip.ipv4_mapped or ip) if isinstance(ip, IPv6Address) else ip


async def read_proxy_header(accepted: socket.socket) -> str | None:
    """Take the header of the PROXY protocol from ``accepted``, and return the address that it names.

    None without a header, or where the proxy speaks for itself. Takes nothing of what follows.

    Raises:
        ProxyHeaderError: it begins like a header, and is none of version 2.
        OSError: the peer has disconnected.
    """
    await _until_readable(accepted)
    # Neither TLS nor a request of HTTP begins so; it is left where it is, for what reads next.
    if accepted.recv(1, socket.MSG_PEEK) != _SIGNATURE[:1]:
        return None
    fixed = await _exactly(accepted, _FIXED_BYTES)
    command, family = fixed[12], fixed[13]
    length = int.from_bytes(fixed[14:])
    if fixed[:12] != _SIGNATURE or command not in {_LOCAL, _FORWARDED} or length > _MAX_REST_BYTES:
        raise ProxyHeaderError
    rest = await _exactly(accepted, length)
    if command == _LOCAL or (size := _ADDRESS_BYTES.get(family)) is None:
        return None  # a check of the proxy's own, or a client without an address
    if length < 2 * (size + _PORT_BYTES):
        raise ProxyHeaderError
    return str(_parsed(str(ip_address(rest[:size]))))


async def _until_readable(accepted: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    arrived = loop.create_future()

    def ready() -> None:
        if not arrived.done():
            arrived.set_result(None)

    loop.add_reader(accepted, ready)
    try:
        await arrived
    finally:
        loop.remove_reader(accepted)


async def _exactly(accepted: socket.socket, size: int) -> bytes:
    """Return the next ``size`` bytes."""
    loop, received = asyncio.get_running_loop(), b""
    while len(received) < size:
        piece = await loop.sock_recv(accepted, size - len(received))
        if not piece:
            raise ConnectionResetError
        received += piece
    return received
