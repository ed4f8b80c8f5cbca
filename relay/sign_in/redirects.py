"""Where an authorization may be sent to: which redirect URIs a client may have, and which one was asked for.

They are compared as text, without any normalisation; but a loopback one may have any port (RFC 8252 section
7.3). Must not know clients.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import urlencode

MAX_LENGTH = 512
_PRINTABLE = re.compile(r"[\x21-\x7E]+")
_LOOPBACK = re.compile(r"http://(localhost|127\.0\.0\.1|\[::1\])(?::([0-9]{1,5}))?(/[^#\\]*)?")
_HTTPS = re.compile(r"https://([a-z0-9](?:[a-z0-9.-]*[a-z0-9])?)(?::[0-9]{1,5})?(?:[/?][^#\\]*)?")
_APP = re.compile(r"([a-z][a-z0-9+-]*(?:\.[a-z0-9+-]+)*):[^#\\]+")
_NUMERIC = re.compile(r"[0-9.]+")
_APPS = frozenset({"cursor", "vscode", "vscode-insiders", "windsurf", "zed"})
"""Schemes of known applications; others have the reversed name of their maker (RFC 8252 section 7.1)."""


class Target(NamedTuple):
    """Where a redirect URI leads: ``shown`` to people, and ``source`` as a source of a content policy."""

    shown: str
    source: str
    is_loopback: bool


def target_of(uri: str) -> Target | None:
    """Return where ``uri`` leads; None if no client may have it.

    >>> target_of("https://claude.ai/api/mcp/auth_callback").shown
    'claude.ai'
    >>> target_of("http://[::1]:4001/callback").source
    'http:'
    >>> target_of("http://localhost.evil.example/callback")
    """
    if len(uri) > MAX_LENGTH or not _PRINTABLE.fullmatch(uri):
        return None
    if (found := _LOOPBACK.fullmatch(uri)) is not None:
        # A policy cannot name an IPv6 address (CSP Level 3, section 2.3.1): then its scheme alone does.
        source = "http:" if found[1] == "[::1]" else f"http://{found[1]}:{found[2] or '*'}"
        return Target("this computer", source, is_loopback=True)
    if (found := _HTTPS.fullmatch(uri)) is not None:
        host = found[1]
        if "." not in host or ".." in host or _NUMERIC.fullmatch(host):
            return None
        return Target(host, "/".join(uri.split("/", 3)[:3]).partition("?")[0], is_loopback=False)
    if (found := _APP.fullmatch(uri)) is not None:
        scheme = found[1]
        if scheme in _APPS or "." in scheme:
            return Target(f"the application {scheme}", f"{scheme}:", is_loopback=False)
    return None


def is_registered(uri: str, registered: Iterable[str]) -> bool:
    """Return whether ``uri`` is one of those that a client has ``registered``, and may have."""
    if target_of(uri) is None:
        return False
    return any(uri == each or _same_loopback(uri, each) for each in registered)


def _same_loopback(uri: str, registered: str) -> bool:
    asked, known = _LOOPBACK.fullmatch(uri), _LOOPBACK.fullmatch(registered)
    return asked is not None and known is not None and (asked[1], asked[3]) == (known[1], known[3])


def place_of(uri: str) -> str:
    """Return ``uri`` without what differs between two sign-ins of one client: the port of a loopback."""
    if (found := _LOOPBACK.fullmatch(uri)) is not None:
        return f"http://{found[1]}{found[3] or ''}"
    return uri


def with_answer(uri: str, answer: dict[str, str]) -> str:
    """Return ``uri`` with the members of the authorization's answer in its query."""
    return f"{uri}{'&' if '?' in uri else '?'}{urlencode(answer)}"
