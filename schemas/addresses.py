"""Addresses that people type: the broker's and the relay's, and what follows from them; and those of peers.

The relay's public URL, in its normal form, is also its audience: what a node pins and signs for, and, with
``/mcp``, what an agent's token is for. Must not resolve or connect.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from urllib.parse import urlsplit

from schemas.error_roots import CommandLineError

CONNECT_PATH = "/devices/connect"
MCP_PATH = "/mcp"


class View(StrEnum):
    """How the fleet is listed: each tool of each node, or one tool for each kind and verb."""

    TOOLS = "tools"
    KINDS = "kinds"


TOOLS_PATH, KINDS_PATH = f"{MCP_PATH}/{View.TOOLS}", f"{MCP_PATH}/{View.KINDS}"
MCP_PATHS = (MCP_PATH, TOOLS_PATH, KINDS_PATH)
"""Where agents speak MCP: views of one fleet, with one set of rights."""
PLAIN_OPTION = "--insecure-plain-transports"
"""The option that allows connections that others on the network can read and change."""
MOST_RELAYS = 64
"""How many relays of one fleet a node is given at most: all are in its arguments, and in one file."""

_SCHEMES = {"http": "http", "ws": "http", "https": "https", "wss": "https"}
_DEFAULT_PORTS = {"http": 80, "https": 443}
_BROKER_PORTS = {"mqtt": 1883, "mqtts": 8883}
_MAX_PORT = 65535
_ZONE = re.compile(r"[A-Za-z0-9._-]{1,16}")
_PORT = re.compile(r"[0-9]{1,5}")
_MAX_HOST = 253
_NAT64 = IPv6Network("64:ff9b::/96")
_SUBSCRIBERS_BITS = 64
_GROUPS_KEPT = 4096
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")


class AddressError(CommandLineError):
    """An address cannot be used; the text says what is expected."""


@dataclass(frozen=True, slots=True)
class HostPort:
    """A host name or address, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """Where an MQTT broker is, and whether it is spoken to over TLS."""

    host: str
    port: int
    tls: bool = False

    def __str__(self) -> str:
        return f"{'mqtts' if self.tls else 'mqtt'}://{HostPort(self.host, self.port)}"

    @property
    def is_private(self) -> bool:
        """Whether it is protected from the network: over TLS, or within this machine."""
        return self.tls or is_loopback(self.host)


def parse_broker(text: str) -> BrokerAddress:
    """Return the broker of ``mqtts://HOST[:PORT]``, ``mqtt://HOST[:PORT]``, or ``HOST:PORT`` without TLS.

    >>> str(parse_broker("mqtts://mqtt.example"))
    'mqtts://mqtt.example:8883'

    Raises:
        AddressError: it is not of that form.
    """
    scheme, separator, rest = text.rpartition("://")
    if not separator:
        address = parse_host_port(text)
        return BrokerAddress(address.host, address.port)
    port = _BROKER_PORTS.get(scheme)
    if port is None:
        raise AddressError(f"{_shown(text)} is not a broker, for example mqtts://mqtt.example:8883")
    bare = ":" not in rest or rest.endswith("]")
    address = parse_host_port(f"{rest}:{port}" if bare else rest)
    return BrokerAddress(address.host, address.port, tls=scheme == "mqtts")


def parse_host_port(text: str) -> HostPort:
    """Return the host and port of ``HOST:PORT``, an IPv6 address in brackets.

    Raises:
        AddressError: it is not of that form.
    """
    host, _, port = text.rpartition(":")
    usable_port = _PORT.fullmatch(port) and 0 < int(port) <= _MAX_PORT
    if is_host(host) and usable_port:
        _check_zone(host)
        return HostPort(host.strip("[]"), int(port))
    example = f"127.0.0.1:{port}" if usable_port and not host else "127.0.0.1:8700"
    raise AddressError(f"{_shown(text)} is not HOST:PORT, for example {example}")


def _shown(text: str) -> str:
    return "an address with credentials" if "@" in text else repr(text)


def _check_zone(host: str) -> None:
    address, zone = host.strip("[]").partition("%")[::2]
    if zone and not ip_address(address).is_link_local:
        raise AddressError(f"{host} has a zone, which link-local addresses alone have: write [{address}]")


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is this machine under a name that no other machine can have."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_public(address: str) -> bool:
    """Return whether ``address`` is of the public internet, however it is written.

    >>> is_public("::ffff:10.0.0.1"), is_public("64:ff9b::a9fe:a9fe"), is_public("93.184.215.14")
    (False, False, True)
    """
    try:
        ip = ip_address(address)
    except ValueError:
        return False
    if isinstance(ip, IPv6Address):
        # Ways in which an IPv6 address is one of IPv4: mapped, 6to4, Teredo, and NAT64.
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo or (None, None))[1]
        if inner is None and ip in _NAT64:
            inner = IPv4Address(int(ip) & 0xFFFF_FFFF)
        if inner is not None:
            return is_public(str(inner))
        if ip.is_site_local:
            return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified)


@lru_cache(maxsize=_GROUPS_KEPT)
def address_group(address: str) -> str | None:
    """Return the group that ``address`` counts towards: itself; of IPv6 its /64, which one subscriber has.

    None for loopback, where a proxy forwards all its clients, and for what is no address.
    """
    try:
        ip = ip_address(address.partition("%")[0])
    except ValueError:
        return None
    ip = (ip.ipv4_mapped or ip) if isinstance(ip, IPv6Address) else ip
    if ip.is_loopback:
        return None
    if isinstance(ip, IPv6Address):
        return str(IPv6Network((int(ip), _SUBSCRIBERS_BITS), strict=False))
    return str(ip)


def collector_url(text: str) -> str:
    """Return the URL of a collector of traces, without credentials, which would be in logs and lists.

    Raises:
        AddressError: it is malformed, or holds credentials.
    """
    try:
        parts = urlsplit(text)
        _ = parts.port  # an invalid port raises only here
    except ValueError:
        parts = urlsplit("")
    plain = text.isascii() and text.isprintable() and " " not in text
    if parts.scheme not in {"http", "https"} or not parts.hostname or "@" in parts.netloc or not plain:
        raise AddressError(f"{_shown(text)} is not the URL of a collector, for example http://127.0.0.1:4318")
    return text


def normal_url(text: str) -> str:
    """Return the relay's URL in its normal form: ``http`` or ``https``, host, port unless usual, no slash.

    >>> normal_url("wss://Relay.Example:443/")
    'https://relay.example'

    Raises:
        AddressError: not such a URL, or one with a path, a query, or credentials.
    """
    shown = "a URL with credentials" if "@" in text else repr(text)
    wrong = AddressError(f"{shown} is not the URL of a relay, for example https://relay.example")
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise wrong from None
    scheme = _SCHEMES.get(parts.scheme)
    if scheme is None or not parts.hostname or parts.path.strip("/") or parts.query or parts.fragment:
        raise wrong
    if parts.username is not None or not text.isascii() or not text.isprintable() or " " in text:
        raise wrong
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    if not is_host(host) or port == 0:
        raise wrong
    usual = port is None or port == _DEFAULT_PORTS[scheme]
    return f"{scheme}://{host}" if usual else f"{scheme}://{host}:{port}"


def parse_mcp_url(text: str) -> tuple[str, str]:
    """Return the relay's URL in its normal form, and the path of MCP in ``text``, ``/mcp`` if it has none.

    >>> parse_mcp_url("https://relay.example/mcp/kinds")
    ('https://relay.example', '/mcp/kinds')

    Raises:
        AddressError: as ``normal_url``.
    """
    base, question, query = text.partition("?")
    base = base.rstrip("/")
    path = next((path for path in MCP_PATHS if base.endswith(path)), None)
    if question and path is not None:
        raise AddressError(f"leave out ?{query} of the relay's URL, and give --names and --view instead")
    return normal_url(base.removesuffix(path) if path is not None else text), path or MCP_PATH


def is_host(text: str) -> bool:
    """Return whether ``text`` is a host name, an IPv4 address, or an IPv6 address in brackets."""
    if text.startswith("[") and text.endswith("]"):
        # The library takes anything for a zone, escapes and brackets too.
        address, percent, zone = text[1:-1].partition("%")
        try:
            known = ip_address(address).version == 6  # noqa: PLR2004 - the version of IPv6
        except ValueError:
            return False
        return known and (not percent or _ZONE.fullmatch(zone) is not None)
    return len(text) <= _MAX_HOST and all(_LABEL.fullmatch(label) for label in text.split("."))


def is_private_url(relay_url: str) -> bool:
    """Return whether it is protected from the network: over TLS, or within this machine."""
    parts = urlsplit(relay_url)
    return parts.scheme == "https" or is_loopback(parts.hostname or "")


def check_private_url(relay_url: str, *, plain_allowed: bool) -> None:
    """Return if the relay is not spoken to in the clear from another machine, or the operator allows it.

    Raises:
        AddressError: it would be.
    """
    if not (plain_allowed or is_private_url(relay_url)):
        raise AddressError(f"{relay_url} is not encrypted: use https, or say {PLAIN_OPTION}")


def check_private_broker(broker: BrokerAddress, *, plain_allowed: bool) -> None:
    """Return if the broker is not spoken to in the clear from another machine, or the operator allows it.

    Raises:
        AddressError: it would be.
    """
    if not (plain_allowed or broker.is_private):
        raise AddressError(f"{broker} is not encrypted: use mqtts, or say {PLAIN_OPTION}")


def host_of(relay_url: str) -> str:
    """Return the host of a relay's URL, an IPv6 address without brackets."""
    return urlsplit(relay_url).hostname or ""


def port_of(relay_url: str) -> int:
    """Return the port of a relay's URL."""
    parts = urlsplit(relay_url)
    return parts.port or _DEFAULT_PORTS[parts.scheme]


def is_secure(relay_url: str) -> bool:
    """Return whether the relay at the normal URL ``relay_url`` is spoken to over TLS."""
    return relay_url.startswith("https://")


def check_one_fleet(relay_urls: Sequence[str]) -> None:
    """Return if all of ``relay_urls``, in their normal form, can be relays of one fleet.

    Raises:
        AddressError: they are too many, or some are over TLS, and some are not.
    """
    if len(relay_urls) > MOST_RELAYS:
        raise AddressError(
            f"{len(relay_urls)} relays are named, and a node takes {MOST_RELAYS} at most: "
            "give several of them one name with their addresses"
        )
    differing = [url for url in relay_urls if is_secure(url) != is_secure(relay_urls[0])]
    if differing:
        raise AddressError(
            f"{relay_urls[0]} and {differing[0]}: the relays of a fleet are all https, or all http"
        )


def connect_url(relay_url: str) -> str:
    """Return the WebSocket URL for nodes on the relay with the normal URL ``relay_url``."""
    return "ws" + relay_url.removeprefix("http") + CONNECT_PATH


def mcp_url(relay_url: str, path: str = MCP_PATH) -> str:
    """Return the URL at which agents speak MCP; that of ``/mcp`` is the audience of tokens issued here."""
    return relay_url + path


def mcp_urls(relay_url: str) -> frozenset[str]:
    """Return the URL of each path of MCP: a token for any of them is good at all."""
    return frozenset(mcp_url(relay_url, path) for path in MCP_PATHS)
