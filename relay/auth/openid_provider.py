"""An OpenID Connect provider, to which the relay is a client: discovery, the code flow, and its ID tokens.

The operator names the issuer, which may be at a private address, over https; only on loopback over http.
Where its metadata lead to another host, that must be at a public address, and is connected to by the address
that was checked. No redirect is followed; time and bytes are bounded. An ID token counts if a key of the
provider's own set has signed it, for this relay, this browser and this sign-in. Must not know people, nor
what a claim allows.
"""

import asyncio
import hmac
import math
import socket
import ssl
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import httpx2
from attrs import define, field, frozen

from relay.auth.fetching import MAX_BYTES, OK, answer_to
from relay.auth.signatures import Jwt
from schemas.addresses import is_loopback, is_public
from schemas.error_roots import PeerError
from schemas.strict_json import StrictJsonError, loads
from schemas.text import printable, quoted
from schemas.tls import client_context

MAX_ID_TOKEN = 32 * 1024
MAX_KEYS = 64
TIMEOUT_S = 5.0
KEPT_S = 3_600.0
MIN_INTERVAL_S = 10.0
"""The least time between two fetches of the metadata, and of the keys, whatever causes them."""
SKEW_S, MAX_AGE_S = 60, 600
_MAX_URL, _MAX_SUBJECT, _MAX_SHOWN = 512, 255, 120

_Resolve = Callable[[str], Awaitable[Sequence[str]]]


class OpenidError(PeerError):
    """The provider cannot be used, or does not prove who signs in; the text is ours, for the operator."""


@frozen
class ProviderMetadata:
    """What of a provider's metadata is used.

    Attributes:
        posts_secret: whether the client's secret is in the form, and not in a header.
        answers_iss: whether its answers name it (RFC 9207): then one that does not is refused.
    """

    authorization: str
    token: str
    jwks: str
    posts_secret: bool
    answers_iss: bool

    @classmethod
    def of(cls, document: Mapping[str, Any], issuer: str) -> "ProviderMetadata":
        """Return what ``document`` says, if it is that of ``issuer``.

        Raises:
            OpenidError: it is not, or the provider has not what is needed.
        """
        if document.get("issuer") != issuer:
            said = quoted(str(document.get("issuer")), _MAX_SHOWN)
            raise OpenidError(f"its metadata are of the issuer {said}: people.oidc must name it so")
        if "S256" not in _words(document, "code_challenge_methods_supported", ("S256",)):
            raise OpenidError("it has no PKCE by S256")
        methods = _words(document, "token_endpoint_auth_methods_supported", ("client_secret_basic",))
        if not any(known in methods for known in ("client_secret_basic", "client_secret_post")):
            raise OpenidError("it takes no secret of a client at its token endpoint")
        urls = [document.get(name) for name in ("authorization_endpoint", "token_endpoint", "jwks_uri")]
        plain = issuer.startswith("http://")
        for url in urls:
            if not isinstance(url, str) or not _is_usable(url, plain=plain):
                raise OpenidError(f"its metadata have {quoted(str(url), _MAX_SHOWN)} for a URL")
        authorization, token, jwks = map(str, urls)
        return cls(
            authorization,
            token,
            jwks,
            posts_secret="client_secret_basic" not in methods,
            answers_iss=document.get("authorization_response_iss_parameter_supported") is True,
        )


def _words(document: Mapping[str, Any], name: str, absent: Sequence[str]) -> Sequence[object]:
    value = document.get(name, absent)
    return value if isinstance(value, Sequence) else ()


def _is_usable(url: str, *, plain: bool) -> bool:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return False
    scheme_fits = parts.scheme == "https" or (
        plain and parts.scheme == "http" and is_loopback(parts.hostname or "")
    )
    text_fits = url.isascii() and url.isprintable() and not {*url} & {*' "\\#;,'} and len(url) <= _MAX_URL
    return scheme_fits and text_fits and bool(parts.hostname) and "@" not in parts.netloc


async def _addresses(host: str) -> Sequence[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


@define(eq=False, repr=False, kw_only=True)
class OpenidProvider:
    """The provider ``issuer``, which knows the relay as ``client_id`` and sends people to ``redirect_uri``.

    ``secret`` reads the client's secret, and waits for a file. ``now_ms`` is since 1970, ``monotonic`` in s.
    """

    issuer: str
    _client_id: str
    _secret: Callable[[], str]
    _redirect_uri: str
    _now_ms: Callable[[], int]
    _monotonic: Callable[[], float]
    _resolve: _Resolve = _addresses
    _is_allowed: Callable[[str], bool] = is_public
    _tls: ssl.SSLContext = field(init=False, factory=client_context)
    _lock: asyncio.Lock = field(init=False, factory=asyncio.Lock)
    _metadata: ProviderMetadata | None = field(init=False, default=None)
    _metadata_s: float = field(init=False, default=-math.inf)
    _asked_s: float = field(init=False, default=-math.inf)
    _fault: str = field(init=False, default="")
    _keys: Sequence[Mapping[str, Any]] = field(init=False, default=())
    _keys_s: float = field(init=False, default=-math.inf)
    _keys_asked_s: float = field(init=False, default=-math.inf)

    # --- documents ---------------------------------------------------------------------------------------

    async def metadata(self) -> ProviderMetadata:
        """Return the provider's metadata, an hour old at most.

        Raises:
            OpenidError: they cannot be had, or not be used.
        """
        async with self._lock:
            now = self._monotonic()
            if self._metadata is not None and now - self._metadata_s < KEPT_S:
                return self._metadata
            if now - self._asked_s < MIN_INTERVAL_S:
                raise OpenidError(self._fault)
            self._asked_s = now
            try:
                url = f"{self.issuer.rstrip('/')}/.well-known/openid-configuration"
                self._metadata = ProviderMetadata.of(await self._document(url), self.issuer)
            except OpenidError as error:
                self._metadata, self._fault = None, str(error)
                raise
            self._metadata_s = now
            return self._metadata

    async def keys(self, *, anew: bool = False) -> Sequence[Mapping[str, Any]]:
        """Return the keys that sign ID tokens, an hour old at most; ``anew``: if they are not just fetched.

        Raises:
            OpenidError: they cannot be had.
        """
        url = (await self.metadata()).jwks
        async with self._lock:
            now = self._monotonic()
            is_due, is_fresh = now - self._keys_asked_s >= MIN_INTERVAL_S, now - self._keys_s < KEPT_S
            if is_fresh and not (anew and is_due):
                return self._keys
            if not is_due:
                raise OpenidError("its keys were not to be had a moment ago")
            self._keys_asked_s = now
            members = (await self._document(url)).get("keys")
            if not isinstance(members, list):
                raise OpenidError("its jwks_uri has no JWK set")
            self._keys = [each for each in members[:MAX_KEYS] if isinstance(each, dict)]
            self._keys_s = now
            return self._keys

    # --- the code flow -----------------------------------------------------------------------------------

    async def authorization_url(
        self, *, state: str, nonce: str, challenge: str, scopes: Sequence[str]
    ) -> str:
        """Return where the browser is sent, for an answer that proves who uses it.

        Raises:
            OpenidError: the provider cannot be used.
        """
        endpoint = (await self.metadata()).authorization
        query = {
            "response_type": "code",
            "client_id": self._client_id,
            "redirect_uri": self._redirect_uri,
            "scope": " ".join(scopes),
            "state": state,
            "nonce": nonce,
            "code_challenge": challenge,
            "code_challenge_method": "S256",
        }
        return f"{endpoint}{'&' if '?' in endpoint else '?'}{urlencode(query)}"

    async def check_answer(self, iss: Sequence[str]) -> None:
        """Return if an answer that names ``iss`` can be of this provider (RFC 9207).

        Raises:
            OpenidError: it is of another one: a mix-up.
        """
        if list(iss) != [self.issuer] and (iss or (await self.metadata()).answers_iss):
            raise OpenidError("the answer is of another issuer")

    async def claims(self, *, code: str, verifier: str, nonce: str) -> Mapping[str, Any]:
        """Return the claims of the ID token that ``code`` is redeemed for.

        Raises:
            OpenidError: the provider does not redeem it, or the token does not prove this sign-in.
        """
        metadata = await self.metadata()
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": self._redirect_uri,
            "code_verifier": verifier,
        }
        headers = {"content-type": "application/x-www-form-urlencoded"}
        try:
            secret = await asyncio.to_thread(self._secret)
        except (OSError, UnicodeDecodeError) as error:
            raise OpenidError(f"the file of its secret cannot be used: {error}") from None
        if metadata.posts_secret:
            form |= {"client_id": self._client_id, "client_secret": secret}
        else:
            pair = f"{quote(self._client_id, safe='')}:{quote(secret, safe='')}"
            headers["authorization"] = f"Basic {b64encode(pair.encode()).decode('ascii')}"
        answer = await self._document(metadata.token, headers, urlencode(form).encode("ascii"))
        token = answer.get("id_token")
        if not isinstance(token, str):
            raise OpenidError("its token endpoint gives no ID token")
        return await self._verified(token, nonce)

    async def _verified(self, token: str, nonce: str) -> Mapping[str, Any]:
        try:
            jwt = Jwt.of(token, MAX_ID_TOKEN)
        except ValueError:
            raise OpenidError("its ID token is no JWT") from None
        if not jwt.has_known_algorithm:
            raise OpenidError("its ID token is not signed by RS256, ES256 or EdDSA: set that for this client")
        if not any(map(jwt.is_verified_by, await self.keys())) and not any(
            map(jwt.is_verified_by, await self.keys(anew=True))
        ):
            raise OpenidError("its ID token is not signed by a key of its jwks_uri")
        self._check(jwt.claims, nonce)
        return jwt.claims

    def _check(self, claims: Mapping[str, Any], nonce: str) -> None:
        """Return if the claims are of this sign-in (OpenID Connect Core 1.0 section 3.1.3.7).

        Raises:
            OpenidError: they are not.
        """
        now, audience, subject = self._now_ms() // 1000, claims.get("aud"), claims.get("sub")
        if claims.get("iss") != self.issuer:
            raise OpenidError("its ID token is of another issuer")
        audiences = audience if isinstance(audience, list) else [audience]
        of_one = audiences == [self._client_id]
        if (
            self._client_id not in audiences
            or claims.get("azp", self._client_id if of_one else None) != self._client_id
        ):
            raise OpenidError("its ID token is for another client")
        expires, issued = _time(claims, "exp"), _time(claims, "iat")
        if expires <= now - SKEW_S or not now - MAX_AGE_S <= issued <= now + SKEW_S:
            raise OpenidError("its ID token is not of now: see the clocks of both")
        if "nbf" in claims and _time(claims, "nbf") > now + SKEW_S:
            raise OpenidError("its ID token is not of now: see the clocks of both")
        found = claims.get("nonce")
        if not isinstance(found, str) or not hmac.compare_digest(
            found.encode("utf-8", "surrogatepass"), nonce.encode()
        ):
            raise OpenidError("its ID token is of another sign-in")
        if not isinstance(subject, str) or not (subject.isascii() and subject.isprintable()):
            raise OpenidError("its ID token has no sub")
        if not 0 < len(subject) <= _MAX_SUBJECT:
            raise OpenidError("its ID token has no sub")

    # --- what is sent ------------------------------------------------------------------------------------

    async def _document(
        self, url: str, headers: Mapping[str, str] | None = None, form: bytes | None = None
    ) -> dict[str, Any]:
        """Return the JSON object at ``url``; with ``form``, the one that answers it.

        Raises:
            OpenidError: there is none, or not in time.
        """
        place = printable(url, _MAX_SHOWN)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                body = await self._answer(url, headers or {}, form)
        except TimeoutError:
            raise OpenidError(f"{place} does not answer in time") from None
        except (ssl.SSLError, httpx2.ConnectError):
            raise OpenidError(f"{place} is not reached, or shows a certificate that is not trusted") from None
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError, UnicodeError):
            raise OpenidError(f"{place} is not reached") from None
        try:
            value = loads(body, max_bytes=MAX_BYTES)
        except StrictJsonError:
            value = None
        if not isinstance(value, dict):
            raise OpenidError(f"{place} answers without a JSON object")
        return value

    async def _answer(self, url: str, headers: Mapping[str, str], form: bytes | None) -> bytes:
        asked = httpx2.URL(url)
        sent = {"accept": "application/json", **headers}
        extensions: dict[str, Any] = {}
        host = urlsplit(url).hostname or ""
        if host != urlsplit(self.issuer).hostname:
            addresses = await self._resolve(host)
            if not addresses or not all(map(self._is_allowed, addresses)):
                raise OpenidError(f"{printable(host, _MAX_SHOWN)} is neither the issuer's host nor public")
            # One of those that were checked: another resolution could answer otherwise.
            sent["host"], extensions["sni_hostname"] = asked.netloc.decode("ascii"), host
            asked = asked.copy_with(host=addresses[0])
        request = httpx2.Request(
            "GET" if form is None else "POST", asked, headers=sent, content=form, extensions=extensions
        )
        status, body = await answer_to(request, self._tls)
        if status != OK:
            raise OpenidError(f"{printable(url, _MAX_SHOWN)} answers {status}")
        if body is None:
            raise OpenidError(f"{printable(url, _MAX_SHOWN)} answers too much")
        return body


async def asked_now(issuer: str) -> int:
    """Return how many keys the provider ``issuer`` has, by its metadata.

    Raises:
        OpenidError: it cannot be used.
    """
    provider = OpenidProvider(
        issuer=issuer,
        client_id="",
        secret=str,
        redirect_uri="",
        now_ms=lambda: 0,
        monotonic=lambda: 0.0,
    )
    if not (keys := await provider.keys()):
        raise OpenidError("its jwks_uri has no key")
    return len(keys)


def _time(claims: Mapping[str, Any], name: str) -> int:
    value = claims.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1 << 40:
        raise OpenidError(f"its ID token has no {name}")
    return int(value)
