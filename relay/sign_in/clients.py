"""Which client it is: by its own published document, or by a registration (RFC 7591).

A registration is nowhere kept: the client's id is the registration, authenticated by a key of the relay. So
strangers cannot fill anything by registering, and there is nothing to expire. Must not decide what a client
may do.
"""

import hmac
import json
import re
import unicodedata
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any

from attrs import define, field, frozen

from relay.sign_in.fetching import Fetcher, FetchError, parts_of
from relay.sign_in.known_clients import imitated_by, known_client
from relay.sign_in.redirects import is_registered, target_of
from schemas.error_roots import PeerError
from schemas.keys import base64url, from_base64url
from schemas.strict_json import StrictJsonError, loads

MAX_DOCUMENT = 16 * 1024
MAX_REDIRECTS = 16
MAX_ID = 4096
NONE, ASSERTION = "none", "private_key_jwt"
_PREFIX = "ekc1_"
_MAC_BYTES = 32
_MAX_NAME = 80
_MAX_AGENT = 60
_KEPT = 256
_MOST_S, _USUAL_S, _LEAST_S = 86_400, 3_600, 60


class ClientError(PeerError):
    """A client cannot be used. ``code`` is that of OAuth; the text is a sentence of our own."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


@frozen
class OAuthClient:
    """A client.

    Attributes:
        name: as it calls itself, printable and short.
        origin: the host that publishes its document; empty for one that has registered itself.
        methods: how it may prove itself at the token endpoint.
        keys: its JWK set, or ``jwks_uri`` where that is.
    """

    id: str
    name: str
    origin: str
    redirect_uris: tuple[str, ...]
    methods: frozenset[str] = frozenset({NONE})
    keys: Mapping[str, Any] | None = None
    jwks_uri: str | None = None

    @property
    def imitates(self) -> str | None:
        """The known client whose name it uses, though nothing proves that it is that one."""
        return None if self.origin else imitated_by(self.name)

    def may_redirect_to(self, uri: str) -> bool:
        return is_registered(uri, self.redirect_uris)


def shown_name(name: object, otherwise: str) -> str:
    r"""Return a name as people can be shown it: one line, short, without what changes how others look.

    >>> shown_name("Evil\u202eedualC\x07", "x")
    'EviledualC'
    """
    if not isinstance(name, str):
        return otherwise
    text = unicodedata.normalize("NFKC", name[: 4 * _MAX_NAME])
    text = "".join(" " if char.isspace() else char for char in text if char.isspace() or char.isprintable())
    text = " ".join(text.split())
    return text[:_MAX_NAME] or otherwise


def _read(client_id: str, members: Mapping[str, Any], origin: str) -> OAuthClient:
    """Return the client that ``members`` describe.

    Raises:
        ClientError: they are malformed, or name no place that a code may be sent to.
    """
    uris = members.get("redirect_uris")
    if not isinstance(uris, list) or not 1 <= len(uris) <= MAX_REDIRECTS:
        raise ClientError("invalid_redirect_uri", f"redirect_uris is a list of 1 to {MAX_REDIRECTS} URIs.")
    # One that no client may have does not bar the others: each authorization is held to the rules.
    usable = tuple(uri for uri in uris if isinstance(uri, str) and target_of(uri) is not None)
    if not usable:
        raise ClientError(
            "invalid_redirect_uri", "None of redirect_uris is https, a loopback http, or an application's."
        )
    methods = _methods(members)
    if not methods:
        raise ClientError("invalid_client_metadata", f"A client proves itself by {NONE} or {ASSERTION}.")
    keys, jwks_uri = members.get("jwks"), members.get("jwks_uri")
    if keys is not None and not isinstance(keys, dict):
        raise ClientError("invalid_client_metadata", "jwks is a JWK set.")
    if jwks_uri is not None and (not isinstance(jwks_uri, str) or parts_of(jwks_uri) is None):
        raise ClientError("invalid_client_metadata", "jwks_uri is an https URL.")
    if ASSERTION in methods and keys is None and jwks_uri is None:
        methods -= {ASSERTION}
        if not methods:
            raise ClientError("invalid_client_metadata", f"{ASSERTION} needs jwks or jwks_uri.")
    name = shown_name(members.get("client_name"), origin or "A client without a name")
    return OAuthClient(client_id, name, origin, usable, methods, keys, jwks_uri)


def _methods(members: Mapping[str, Any]) -> frozenset[str]:
    named: list[object] = []
    several = members.get("token_endpoint_auth_methods_supported")
    if isinstance(several, list):
        named += several
    if "token_endpoint_auth_method" in members:
        named.append(members["token_endpoint_auth_method"])
    known = {each for each in (NONE, ASSERTION) if each in named}
    return frozenset(known if named else {NONE})


@define(eq=False, repr=False)
class Clients:
    """Finds clients by their id, and registers them with ``key``. ``monotonic`` is in seconds.

    Without a ``fetcher`` no document is read: a client is in the table of those that are known, or registers.
    """

    _key: bytes
    _fetcher: Fetcher | None
    _monotonic: Callable[[], float]
    _documents: OrderedDict[str, tuple[float, OAuthClient]] = field(init=False, factory=OrderedDict)
    _key_sets: OrderedDict[str, tuple[float, Mapping[str, Any]]] = field(init=False, factory=OrderedDict)

    def register(self, body: bytes) -> dict[str, Any]:
        """Return the answer to a registration.

        Raises:
            ClientError: it is refused.
        """
        try:
            members = loads(body, max_bytes=MAX_DOCUMENT)
        except StrictJsonError:
            members = None
        if not isinstance(members, dict):
            raise ClientError("invalid_client_metadata", "Send a JSON object, as RFC 7591 describes.")
        if members.get("token_endpoint_auth_method") == ASSERTION:
            # Who has keys at a URL has a document at one, too; a stranger's id must not make us fetch.
            raise ClientError(
                "invalid_client_metadata", f"Register with {NONE}; {ASSERTION} needs a document."
            )
        # A client that would have a secret is told that it has none.
        client = _read("", {name: members.get(name) for name in ("client_name", "redirect_uris")}, "")
        kept = {"n": client.name, "r": list(client.redirect_uris)}
        data = json.dumps(kept, separators=(",", ":"), sort_keys=True).encode("ascii")
        client_id = f"{_PREFIX}{base64url(self._mac(data) + data)}"
        if len(client_id) > MAX_ID:
            raise ClientError("invalid_client_metadata", "The registration is too long.")
        return {
            "client_id": client_id,
            "client_name": client.name,
            "redirect_uris": list(client.redirect_uris),
            "grant_types": ["authorization_code", "refresh_token"],
            "response_types": ["code"],
            "token_endpoint_auth_method": NONE,
        }

    def _mac(self, data: bytes) -> bytes:
        return hmac.digest(self._key, b"registration\0" + data, sha256)

    def name_of(self, client_id: str) -> str:
        """Return what can be said of a client without asking anybody: its registered name, or its host.

        Raises:
            ClientError: it is none.
        """
        if client_id.startswith(_PREFIX):
            return self._registered(client_id).name
        if (parts := parts_of(client_id)) is None:
            raise ClientError("invalid_client", "This client is not registered here.")
        return parts[0]

    async def find(self, client_id: str) -> OAuthClient:
        """Return the client of that id.

        Raises:
            ClientError: there is none.
        """
        if client_id.startswith(_PREFIX):
            return self._registered(client_id)
        if (parts := parts_of(client_id)) is None:
            raise ClientError("invalid_client", "This client is not registered here.")
        kept = self._documents.get(client_id)
        if kept is not None and kept[0] > self._monotonic():
            return kept[1]
        if self._fetcher is None:
            return _known(client_id, "This relay reads no documents of clients: have the client register.")
        try:
            fetched = await self._fetcher.fetch(client_id)
        except FetchError as error:
            return _known(client_id, f"The document of this client could not be read: {error}.")
        members = _json(fetched.body)
        if members is None or members.get("client_id") != client_id:
            raise ClientError("invalid_client", "The document of this client is not that of its client_id.")
        if "client_secret" in members:
            raise ClientError("invalid_client", "The document of this client has a secret in it.")
        client = _read(client_id, members, parts[0])
        self._keep(self._documents, client_id, client, fetched.max_age_s)
        return client

    def _registered(self, client_id: str) -> OAuthClient:
        try:
            data = from_base64url(client_id.removeprefix(_PREFIX)) if len(client_id) <= MAX_ID else b""
        except ValueError:
            data = b""
        mac, data = data[:_MAC_BYTES], data[_MAC_BYTES:]
        if not data or not hmac.compare_digest(mac, self._mac(data)):
            raise ClientError("invalid_client", "This client is not registered here: it registers again.")
        members = json.loads(data)
        return OAuthClient(client_id, members["n"], "", tuple(members["r"]))

    async def keys_of(self, client: OAuthClient) -> Sequence[Mapping[str, Any]]:
        """Return the keys by which ``client`` proves itself.

        Raises:
            ClientError: it has none, or they cannot be read.
        """
        if ASSERTION not in client.methods or self._fetcher is None:
            raise ClientError("invalid_client", f"This client has not announced {ASSERTION}.")
        keys: Mapping[str, Any] | None = client.keys
        if keys is None and client.jwks_uri is not None:
            kept = self._key_sets.get(client.jwks_uri)
            if kept is not None and kept[0] > self._monotonic():
                keys = kept[1]
            else:
                try:
                    fetched = await self._fetcher.fetch(client.jwks_uri)
                except FetchError as error:
                    raise ClientError(
                        "invalid_client", f"The client's keys could not be read: {error}."
                    ) from None
                keys = _json(fetched.body)
                if keys is not None:
                    self._keep(self._key_sets, client.jwks_uri, keys, fetched.max_age_s)
        members = keys.get("keys") if keys is not None else None
        if not isinstance(members, list):
            raise ClientError("invalid_client", "The client has no JWK set.")
        return [each for each in members[:MAX_REDIRECTS] if isinstance(each, dict)]

    def _keep(
        self, kept: OrderedDict[str, tuple[float, Any]], key: str, value: Any, age_s: int | None
    ) -> None:
        age = min(max(_USUAL_S if age_s is None else age_s, _LEAST_S), _MOST_S)
        kept[key] = (self._monotonic() + age, value)
        kept.move_to_end(key)
        if len(kept) > _KEPT:
            kept.popitem(last=False)


def _json(body: bytes) -> dict[str, Any] | None:
    try:
        value = loads(body, max_bytes=MAX_DOCUMENT * 4)
    except StrictJsonError:
        return None
    return value if isinstance(value, dict) else None


def _known(client_id: str, why: str) -> OAuthClient:
    """Return the client of the table.

    Raises:
        ClientError: it is in no row of it.
    """
    if (found := known_client(client_id)) is None:
        raise ClientError("invalid_client", why)
    known, redirects = found
    return OAuthClient(client_id, known.name, (parts_of(client_id) or ("", ""))[0], redirects)


def agent_name(person: str, client: OAuthClient) -> str:
    """Return the ``sub`` of the tokens of ``client`` for ``person``: both are in the audit.

    A host has a dot. A name that nothing proves has none, and so is never that of a host.

    >>> agent_name("ada", OAuthClient("https://claude.ai/x", "Claude", "claude.ai", ()))
    'ada/claude.ai'
    >>> agent_name("ada", OAuthClient("x", "claude.ai", "", ()))
    'ada/claude-ai'
    """
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", client.name).strip("-")[:_MAX_AGENT] or "client"
    return f"{person}/{client.origin[-_MAX_AGENT:] or name}"
