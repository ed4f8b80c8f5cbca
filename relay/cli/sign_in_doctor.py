"""``relay doctor --sign-in URL``: what keeps clients from signing in at a relay, asked from outside.

It walks from the 401 to the token endpoint with a client of its own, which no person has allowed anything.
Must not need the relay's state, and must not follow what a server says to another host.
"""

import asyncio
import ipaddress
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlencode, urlsplit

import httpx2

from relay.client.http import (
    ANSWERED_WITHIN_S,
    CONNECT_TIMEOUT_S,
    MOST_ANSWER_BYTES,
    short_answer,
    tls_by,
    why_unreachable,
)
from schemas.addresses import KINDS_PATH, is_loopback, mcp_url
from schemas.error_roots import PeerError
from schemas.process.doctor import DoctorChecks, Finding, NotCheckedError
from schemas.strict_json import StrictJsonError, loads
from schemas.text import printable

_LOOPBACK = "http://127.0.0.1:33418/callback"
_REDIRECTS = ["https://client.example/callback", _LOOPBACK, "cursor://anysphere.cursor-mcp/oauth/callback"]
_CHALLENGE = "E9Melhoa2OwvFrEMTJguCHaoeK1t8URWbuGJSstw-cM"
_MOST_SKEW_S = 60
_MAX_SHOWN = 120

CHECKS = DoctorChecks["SignInChecks"]()
"""In the order in which a client goes."""
_check = CHECKS.add


class WrongAnswerError(PeerError):
    """What came back is not what a client can use."""


def _list(document: dict[str, Any], name: str) -> list[Any]:
    found = document.get(name)
    return found if isinstance(found, list) else []


def addresses_of(host: str) -> list[str]:
    """Return the addresses of ``host``."""
    return sorted({str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})


@dataclass
class SignInChecks:
    """The checks of the relay at ``url``. ``resolve`` returns addresses, ``now_s`` is since 1970."""

    url: str
    resolve: Callable[[str], list[str]] = addresses_of
    now_s: Callable[[], float] = time.time
    _kept: dict[str, httpx2.Response] = field(default_factory=dict)

    def _ask(self, path: str, method: str = "GET", **options: Any) -> httpx2.Response:
        """Return the answer; what was asked before is not asked again.

        Raises:
            WrongAnswerError: there is none, or one that clients do not follow.
        """
        key = f"{method} {path} {options}"
        if key not in self._kept:
            transport = httpx2.AsyncHTTPTransport(verify=tls_by(None), trust_env=False)
            client = httpx2.AsyncClient(transport=transport, timeout=CONNECT_TIMEOUT_S, trust_env=False)
            try:
                self._kept[key] = asyncio.run(short_answer(client, method, self.url + path, **options))
            except TimeoutError:
                raise WrongAnswerError(f"{path} is not answered in {ANSWERED_WITHIN_S:.0f} s") from None
            except httpx2.HTTPError as error:
                reason, advice = why_unreachable(error, self.url, None, takes_root=False)
                raise WrongAnswerError(reason + (f"; {advice}" if advice else "")) from None
        answer = self._kept[key]
        if answer.status_code == httpx2.codes.SERVICE_UNAVAILABLE:
            raise WrongAnswerError(
                f"{path} answers 503: no sign-in at present; `relay status` there says what is away "
                "(in a cluster: NATS, or the relay with the CA's key), and the log what fails"
            )
        if answer.is_redirect:
            to = printable(answer.headers.get("location", ""), _MAX_SHOWN)
            raise WrongAnswerError(f"{path} redirects to {to}: clients do not follow, or drop what they send")
        return answer

    def _json(self, path: str, method: str = "GET", **options: Any) -> dict[str, Any]:
        answer = self._ask(path, method, **options)
        try:
            value = loads(answer.content, max_bytes=MOST_ANSWER_BYTES)
        except StrictJsonError:
            value = None
        if not isinstance(value, dict):
            raise WrongAnswerError(
                f"{path} answers {answer.status_code} without JSON: see what the proxy does with it"
            )
        return value

    def _metadata(self) -> dict[str, Any]:
        try:
            return self._json("/.well-known/oauth-authorization-server")
        except WrongAnswerError as error:
            raise NotCheckedError("there is no metadata") from error

    def _registered(self) -> dict[str, Any]:
        body = {
            "client_name": "relay doctor",
            "redirect_uris": _REDIRECTS,
            "token_endpoint_auth_method": "none",
        }
        return self._json("/register", "POST", json=body)

    def _client_id(self) -> str:
        found = self._registered().get("client_id")
        if not isinstance(found, str):
            raise NotCheckedError("no client can register")
        return found

    @_check(
        "address",
        "The relay's name must have a public IPv4 address: hosted clients (claude.ai, ChatGPT) refuse private"
        " ones, and connect over IPv4 alone. Clients on your own machines need what these machines reach.",
    )
    def address(self) -> Finding:
        host = urlsplit(self.url).hostname or ""
        if host == "localhost" or is_loopback(host):
            fix = "hosted clients need a public name: docs/sign-in.md"
            return Finding.warning(f"{host} is this machine", fix)
        try:
            found = [ipaddress.ip_address(each.partition("%")[0]) for each in self.resolve(host)]
        except OSError:
            return Finding.failure(f"{host} has no address", "make a DNS record of it, or correct the URL")
        if private := [str(each) for each in found if not each.is_global]:
            return Finding.warning(
                f"{host} has the private address {private[0]}",
                "hosted clients refuse it: give it a public one",
            )
        if not any(each.version == 4 for each in found):  # noqa: PLR2004 - of IP
            return Finding.warning(f"{host} has IPv6 addresses alone", "hosted clients need an A record too")
        return Finding.good(", ".join(map(str, found)))

    @_check(
        "certificate",
        "The relay must be reached over https, with a certificate that everybody trusts: browsers make"
        " passkeys, and hosted clients connect, for no other.",
    )
    def certificate(self) -> Finding:
        local = urlsplit(self.url).hostname == "localhost"
        if not self.url.startswith("https://") and not local:
            return Finding.failure(
                f"{self.url} is not https", "serve it over TLS, or behind a proxy that does"
            )
        self._ask("/healthz")
        return Finding.good("http on this machine" if local else "trusted")

    @_check(
        "host",
        "A proxy must pass on Host as the client sent it: the relay answers 421 to any name but its own.",
    )
    def host(self) -> Finding:
        answer = self._ask("/healthz")
        if answer.status_code == httpx2.codes.MISDIRECTED_REQUEST:
            return Finding.failure(
                "the relay has another name: its --public-url differs, or a proxy rewrites Host",
                f"run it with --public-url {self.url}, and have the proxy pass on Host",
            )
        if answer.status_code != httpx2.codes.OK:
            return Finding.failure(
                f"/healthz answers {answer.status_code}", "see the log of the relay and of the proxy"
            )
        return Finding.good("the relay answers to this name")

    @_check("clock", "The relay's clock and this machine's must agree to a minute: tokens name times.")
    def clock(self) -> Finding:
        try:
            date = parsedate_to_datetime(self._ask("/healthz").headers.get("date", ""))
            ahead = date.timestamp() - self.now_s()
        except (ValueError, OverflowError):
            raise NotCheckedError("the answer has no date") from None
        if abs(ahead) > _MOST_SKEW_S:
            way = "ahead of" if ahead > 0 else "behind"
            return Finding.failure(
                f"the relay's clock is {abs(ahead):.0f} s {way} this machine's", "set both by NTP"
            )
        return Finding.good("agrees with this machine's")

    @_check(
        "challenge",
        "A request without a token must get 401 with WWW-Authenticate, which names the metadata of the path"
        " that was asked for (RFC 9728), with this relay's own URL.",
    )
    def challenge(self) -> Finding:
        answer = self._ask(KINDS_PATH, "POST", json={})
        challenge = answer.headers.get("www-authenticate", "")
        found = re.search(r'resource_metadata="([^"]*)"', challenge)
        if answer.status_code != httpx2.codes.UNAUTHORIZED or not challenge:
            return Finding.failure(
                f"{KINDS_PATH} answers {answer.status_code} without a challenge",
                "have the proxy pass on what the relay answers",
            )
        if found is None:
            return Finding.failure("the relay has no sign-in", "run `relay people invite NAME` on the hub")
        wanted = f"{self.url}/.well-known/oauth-protected-resource{KINDS_PATH}"
        if found[1] != wanted:
            return Finding.failure(
                f"the challenge names {printable(found[1], _MAX_SHOWN)}",
                f"run the relay with --public-url {self.url}",
            )
        return Finding.good("names its metadata")

    @_check(
        "resource",
        "The metadata of each path of MCP (RFC 9728) must name that path's URL as its resource: VS Code"
        " compares it letter by letter; and this relay as its authorization server.",
    )
    def resource(self) -> Finding:
        for path in ("/mcp", "/mcp/tools", KINDS_PATH):
            document = self._json(f"/.well-known/oauth-protected-resource{path}")
            if document.get("resource") != mcp_url(self.url, path):
                return Finding.failure(
                    f"the metadata of {path} are for {printable(str(document.get('resource')), _MAX_SHOWN)}",
                    f"run the relay with --public-url {self.url}",
                )
            if self.url not in _list(document, "authorization_servers"):
                return Finding.failure(
                    f"the metadata of {path} name another authorization server", "see the proxy"
                )
        return Finding.good("each path is its own")

    @_check(
        "metadata",
        "Clients look for the authorization server's metadata at several paths. Each must be the same"
        " document: a second sign-in of that name (of Home Assistant, say) is what some clients would find.",
    )
    def metadata(self) -> Finding:
        own = self._json("/.well-known/oauth-authorization-server")
        issuer = printable(str(own.get("issuer")), _MAX_SHOWN)
        if own.get("issuer") != self.url:
            return Finding.failure(f"the issuer is {issuer}", f"run the relay with --public-url {self.url}")
        if "S256" not in _list(own, "code_challenge_methods_supported"):
            return Finding.failure(
                "code_challenge_methods_supported has no S256", "another program answers there: see the proxy"
            )
        for path in (
            "oauth-authorization-server/mcp/kinds",
            "openid-configuration",
            "openid-configuration/mcp/kinds",
        ):
            if self._json(f"/.well-known/{path}") != own:
                return Finding.failure(
                    f"/.well-known/{path} is of another authorization server", "give each its own name"
                )
        return Finding.good("the same at each path")

    @_check(
        "registration",
        "Clients without a document of themselves register. One registration may name several redirects, of"
        " which some are not accepted; null members in the answer break Claude Code.",
    )
    def registration(self) -> Finding:
        self._metadata()
        answer = self._registered()
        if "client_id" not in answer or None in answer.values():
            text = printable(str(answer.get("error_description", "no client_id")), _MAX_SHOWN)
            return Finding.failure(
                f"a registration is refused: {text}", "have the proxy pass on POST /register"
            )
        return Finding.good("a client can register")

    @_check(
        "authorization",
        "The page of the authorization must open for each form of redirect: https, another port of this"
        " machine, an application's own.",
    )
    def authorization(self) -> Finding:
        client_id = self._client_id()
        for redirect in (_REDIRECTS[0], "http://127.0.0.1:50123/callback", _REDIRECTS[2]):
            query = {
                "response_type": "code",
                "client_id": client_id,
                "redirect_uri": redirect,
                "state": "doctor",
                "code_challenge": _CHALLENGE,
                "code_challenge_method": "S256",
                "resource": mcp_url(self.url, KINDS_PATH),
            }
            page = self._ask(f"/authorize?{urlencode(query)}")
            if page.status_code != httpx2.codes.OK or "<h1>Sign in</h1>" not in page.text:
                return Finding.failure(
                    f"/authorize answers {page.status_code} for {redirect}",
                    "have the proxy pass it on as it is",
                )
        return Finding.good("the page opens")

    @_check("token", "The token endpoint must answer in JSON, and refuse a code that was never issued.")
    def token(self) -> Finding:
        form = {"grant_type": "authorization_code", "code": "none", "client_id": self._client_id()}
        answer = self._json("/token", "POST", data=form | {"code_verifier": "v" * 43})
        if answer.get("error") != "invalid_grant":
            return Finding.failure(
                f"/token answers {printable(str(answer.get('error')), _MAX_SHOWN)}",
                "have the proxy pass on POST /token",
            )
        return Finding.good("answers, and refuses a code that was never issued")
