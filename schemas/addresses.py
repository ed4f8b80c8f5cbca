"""Addresses that people type: the broker's ``HOST:PORT`` and the relay's URL, and what follows from them.

The relay's public URL, in its normal form, is also its audience: what a node pins and signs for, and, with
``/mcp``, what an agent's token is for. Must not resolve or connect.
"""

import re
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from schemas.frames import CONNECT_PATH

MCP_PATH = "/mcp"

_SCHEMES = {"http": "http", "ws": "http", "https": "https", "wss": "https"}
_DEFAULT_PORTS = {"http": 80, "https": 443}
_MAX_PORT = 65535
_MAX_HOST = 253
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")


class AddressError(ValueError):
    """An address cannot be used; the text says what is expected."""


@dataclass(frozen=True, slots=True)
class HostPort:
    """A host name or address, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_host_port(text: str) -> HostPort:
    """Return the host and port of ``HOST:PORT``, an IPv6 address in brackets.

    Raises:
        AddressError: it is not of that form.
    """
    host, _, port = text.rpartition(":")
    if _is_host(host) and port.isascii() and port.isdigit() and 0 < int(port) <= _MAX_PORT:
        return HostPort(host.strip("[]"), int(port))
    raise AddressError(f"{text!r} is not HOST:PORT, for example 127.0.0.1:1883")


def is_loopback(host: str) -> bool:
    """Tell whether ``host`` is this machine under a name that no other machine can have."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def normal_url(text: str) -> str:
    """Return the relay's URL in its normal form: ``http`` or ``https``, host, port unless usual, no slash.

    >>> normal_url("wss://Relay.Example:443/")
    'https://relay.example'

    Raises:
        AddressError: not such a URL, or one with a path, a query, or credentials.
    """
    wrong = AddressError(f"{text!r} is not the URL of a relay, for example https://relay.example")
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
    if not _is_host(host) or port == 0:
        raise wrong
    usual = port is None or port == _DEFAULT_PORTS[scheme]
    return f"{scheme}://{host}" if usual else f"{scheme}://{host}:{port}"


def _is_host(text: str) -> bool:
    """Tell whether ``text`` is a host name, an IPv4 address, or an IPv6 address in brackets."""
    if text.startswith("[") and text.endswith("]"):
        try:
            return ip_address(text[1:-1]).version == 6  # noqa: PLR2004 - the version of IPv6
        except ValueError:
            return False
    return len(text) <= _MAX_HOST and all(_LABEL.fullmatch(label) for label in text.split("."))


def connect_url(relay_url: str) -> str:
    """Return the WebSocket URL of the node's door on the relay with the normal URL ``relay_url``.

    Raises:
        AddressError: it would send commands in the clear over a network.
    """
    parts = urlsplit(relay_url)
    if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
        raise AddressError(f"{relay_url} is not encrypted: use https, http is for this machine alone")
    return "ws" + relay_url.removeprefix("http") + CONNECT_PATH


def mcp_url(relay_url: str) -> str:
    """Return the URL that agents speak MCP to; it is also the audience of their tokens."""
    return relay_url + MCP_PATH
