"""Agents' tokens and who calls with them: accepted keys, issuing a token, identifying a caller by one.

Deny by default: a token is accepted only if its issuer, audience, class and lifetime are proven. What a token
proved is all that is kept of it. Must not decide what a caller may do: that is ``calls``. Must never log a
token.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from hashlib import sha256
from typing import Any, NamedTuple

from attrs import define, field
from nacl.signing import SigningKey

from relay.auth.issuer_keys import IssuerKeys
from relay.auth.permissions import EXCLUDES, SCOPES, Rights
from relay.observability.ascii_json import members_of
from relay.state.tokens import AcceptedKey, key_id
from schemas.addresses import MCP_PATH
from schemas.canonical import jcs
from schemas.error_roots import OperatorError
from schemas.errors import Failure, ToolError
from schemas.manifest import MAX_FUTURE_MS
from schemas.registry import SchemaRegistry
from schemas.times import ValidityClock
from schemas.tokens import AGENT_REF, MAX_TOKEN_BYTES, TokenError, TokenReason, TokenVerifier, sign_token
from schemas.violations import ViolationError

MAX_TTL_S = 365 * 86_400
"""How long a token may be valid that is issued here: one that was forgotten must end by itself."""
AgentName = tuple[str, str, str]
"""Issuer, tenant and subject: the same for every token that an agent holds."""
_SOME_KINDS = re.compile(r"!?(?=.*[.*])[a-z*][a-z0-9_*]*(\.[a-z*][a-z0-9_*]*){0,3}")
"""A pattern that the name of some kind may match: words with dots between them."""
_CACHE_SIZE = 4096
# The issuer's clock may differ from ours by as much as a node's.
_EARLY_S = MAX_FUTURE_MS // 1000
CALLER_IN_SCOPE = "edge.caller"
"""Where the guard puts the ``Caller`` of an HTTP request."""


@dataclass(frozen=True, slots=True)
class Principal:
    """The caller, as the token proved it.

    Attributes:
        kid, key: the key that the token was signed with, by its name and as its 32 bytes.
        kinds, nodes: what the token says of the kinds and the nodes that it is for; None if nothing.
        rights: what scopes, kinds and nodes allow.
        name: the agent's.
        digest: a SHA-256 of the name, hex: for what shall know the agent again, and not its name.
        members: its members of an audit line, as ``members_of`` returns them.
        token: what has proven it, for the relay of the fleet that is asked on its behalf; empty where there
            are no others. Never shown.
    """

    tenant: str
    sub: str
    jti: str
    issuer: str
    scopes: frozenset[str]
    expires_s: int
    kid: str
    key: bytes
    kinds: tuple[str, ...] | None = None
    nodes: tuple[str, ...] | None = None
    token: str = dataclass_field(default="", repr=False, compare=False)
    rights: Rights = dataclass_field(init=False)
    name: AgentName = dataclass_field(init=False)
    digest: str = dataclass_field(init=False)
    members: str = dataclass_field(init=False)

    def __post_init__(self) -> None:
        # Computed once: read at every call, and constant while the token is valid.
        object.__setattr__(self, "rights", Rights.of(self.tenant, self.scopes, self.kinds, self.nodes))
        object.__setattr__(self, "name", (self.issuer, self.tenant, self.sub))
        object.__setattr__(self, "digest", sha256(jcs(list(self.name))).hexdigest())
        facts = {
            "tenant": self.tenant,
            "iss": self.issuer or None,
            "sub": self.sub,
            "jti": self.jti or None,
        }
        object.__setattr__(self, "members", members_of(facts))

    def facts(self) -> Mapping[str, Any]:
        """Return what another relay is told of it, as ``Authenticator.forwarded`` takes it: not the token."""
        return {
            "tenant": self.tenant,
            "sub": self.sub,
            "jti": self.jti,
            "issuer": self.issuer,
            "scopes": sorted(self.scopes),
            "expires_s": self.expires_s,
            "kid": self.kid,
            # Only where there are some: a relay of 0.2 knows neither, and refuses what it does not know.
            **({} if self.kinds is None else {"kinds": list(self.kinds)}),
            **({} if self.nodes is None else {"nodes": list(self.nodes)}),
        }

    @classmethod
    def of_relay(cls, tenant: str) -> "Principal":
        """Return the relay itself, as the caller of a node of ``tenant``.

        Without issuer and token id, which every token has: no token can prove to be it.
        """
        return cls(
            tenant=tenant,
            sub="relay",
            jti="",
            issuer="",
            scopes=frozenset(),
            expires_s=0,
            kid="",
            key=b"",
        )


class Caller(NamedTuple):
    """The caller of one request.

    Attributes:
        principal: who it is, as the token proved it; its ``jti`` is the token's id.
        transport: ``http``, or ``stdio`` where a bridge says so. For logs alone.
        headers: the request's headers that are read behind the guard, by lower-case name.
        query: the URL's query, unparsed.
        size: bytes of the request's body; 0 until it was read.
        path: the URL's path, one of MCP.
    """

    principal: Principal
    transport: str
    headers: Mapping[bytes, str]
    query: str = ""
    size: int = 0
    path: str = MCP_PATH

    @property
    def traceparent(self) -> str | None:
        """The request's trace (W3C Trace Context); not validated."""
        return self.headers.get(b"traceparent")

    @property
    def correlation_id(self) -> str | None:
        """The id that the caller gave to what it requests; not validated."""
        return self.headers.get(b"x-correlation-id")


class TokenOptionError(OperatorError):
    """What the operator wants in a token is not of its form; ``where`` is a JSON pointer to the claim."""

    def __init__(self, text: str, where: str) -> None:
        super().__init__(text)
        self.where = where


class TokenIssuer:
    """Signs agents' tokens with the relay's own key."""

    def __init__(self, key: SigningKey, issuer: str, audience: str, registry: SchemaRegistry) -> None:
        self._claims = registry.load(AGENT_REF)
        self._key = key
        self._issuer = issuer
        self._audience = audience

    def issue(  # noqa: PLR0913 - a token has this many facts
        self,
        *,
        sub: str,
        tenant: str,
        scopes: list[str],
        now_s: int,
        ttl_s: int,
        jti: str,
        kinds: Sequence[str] = (),
        nodes: Sequence[str] = (),
    ) -> str:
        """Return a token that is valid for ``ttl_s`` seconds, for these kinds and nodes or for all.

        Raises:
            TokenOptionError: a claim is not of its form; or it would be for nothing, valid for longer than
                ``MAX_TTL_S``, or longer than any that is accepted.
        """
        if ttl_s > MAX_TTL_S:
            raise TokenOptionError(f"/exp must be within {MAX_TTL_S // 86_400} days", "/exp")
        claims = {
            "iss": self._issuer,
            "aud": self._audience,
            "sub": sub,
            "tenant": tenant,
            "scope": " ".join(scopes),
            "iat": now_s,
            "exp": now_s + ttl_s,
            "jti": jti,
            "token_class": "agent_runtime",
            **({"kinds": list(kinds)} if kinds else {}),
            **({"nodes": list(nodes)} if nodes else {}),
        }
        for claim, patterns in (("kinds", kinds), ("nodes", nodes)):
            if patterns and all(each.startswith(EXCLUDES) for each in patterns):
                text = f"/{claim} only excludes: name what the token is for too, '*' for all"
                raise TokenOptionError(text, f"/{claim}")
        try:
            self._claims.check(claims)
        except ViolationError as error:
            raise TokenOptionError(error.sentence, error.where) from None
        if no_name := next((each for each in kinds if not _SOME_KINDS.fullmatch(each)), None):
            raise TokenOptionError(f"/kinds has {no_name!r}, which is the name of no kind", "/kinds")
        token = sign_token(self._key, key_id(bytes(self._key.verify_key)), claims)
        if len(token) > MAX_TOKEN_BYTES:
            where = "/nodes" if sum(map(len, nodes)) > sum(map(len, kinds)) else "/kinds"
            raise TokenOptionError(f"{where} does not fit into a token: name fewer, or use *", where)
        return token


@dataclass(frozen=True, slots=True)
class ExternalIssuer:
    """Another issuer whose tokens are accepted: its name, the verifier of its tokens, and its keys."""

    issuer: str
    verifier: TokenVerifier
    keys: IssuerKeys


@define(eq=False, repr=False)
class Authenticator:
    """Verifies agents' tokens, and caches what it has verified.

    A token must be for one of ``audiences``. A key is valid for one issuer: ``keys``, which may change, for
    the relay; those of ``external`` for that issuer. ``keeps_tokens``: other relays are to verify them too.
    """

    _verifier: TokenVerifier
    _keys: Mapping[str, bytes]
    _issuer: str
    _audiences: frozenset[str]
    _now_ms: ValidityClock
    _external: ExternalIssuer | None = None
    _keeps_tokens: bool = False
    _revoked: frozenset[str] = field(init=False, default=frozenset())
    _verified: dict[bytes, Principal] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        if self._external is not None:
            self._external.keys.follow(self._verified.clear)

    def revoke(self, jtis: frozenset[str]) -> None:
        """Reject the tokens ``jtis`` from now on, and no others."""
        self._revoked = jtis

    async def recognise(self, token: str) -> Principal:
        """Return the holder of ``token``; if its key is unknown, fetch the external issuer's keys first.

        Raises:
            TokenError: the token is not accepted.
        """
        try:
            return self.identify(token)
        except TokenError as error:
            if error.reason is not TokenReason.UNKNOWN_KEY or self._external is None:
                raise
        await self._external.keys.refresh()
        return self.identify(token)

    def identify(self, token: str) -> Principal:
        """Return the holder of ``token``. The signature is checked once, all else of ``check`` at every call.

        Raises:
            TokenError: the token is not accepted.
        """
        digest = _digest_of(token)
        principal = self._verified.get(digest)
        if principal is None:
            principal = self._verify(token)
            if len(self._verified) >= _CACHE_SIZE:
                del self._verified[next(iter(self._verified))]
            self._verified[digest] = principal
        try:
            self.check(principal)
        except TokenError:
            del self._verified[digest]
            raise
        return principal

    def known(self, token: str) -> Principal | None:
        """Return who has proved to be the holder of ``token`` before, without a check whether it is still."""
        return self._verified.get(_digest_of(token))

    def check(self, principal: Principal) -> None:
        """Return if the token that proved ``principal`` is still accepted.

        Raises:
            TokenError: ``revoked``, ``expired``, or ``unknown_key`` where its issuer has withdrawn the key.
        """
        if principal.jti in self._revoked:
            raise TokenError(TokenReason.REVOKED)
        if principal.expires_s <= self._now_ms() // 1000:
            raise TokenError(TokenReason.EXPIRED)
        if self._key_of(principal.kid) != principal.key:
            raise TokenError(TokenReason.UNKNOWN_KEY)

    async def of_asker(self, token: str | None, facts: Mapping[str, Any]) -> Principal:
        """Return for whom another relay of the fleet asks, by the ``token`` that it has sent along.

        Until the fleet is sealed it sends none, and what it says, ``facts``, counts.

        Raises:
            ToolError: SAFETY_DENIED: the token is not accepted here.
        """
        try:
            return self.forwarded(**facts) if token is None else await self.recognise(token)
        except TokenError:
            raise ToolError(Failure.SAFETY_DENIED) from None

    def forwarded(self, *, kid: str, scopes: Iterable[str], **facts: Any) -> Principal:
        """Return the principal that another relay of the fleet has recognised, by a key that is known here.

        ``facts`` are the other members of ``Principal`` but its key.

        Raises:
            TokenError: its token would not be accepted here.
        """
        known = frozenset(scopes).intersection(SCOPES)
        facts |= {claim: _patterns(facts, claim) for claim in ("kinds", "nodes")}
        principal = Principal(kid=kid, key=self._key_of(kid) or b"", scopes=known, **facts)
        self.check(principal)
        return principal

    def _key_of(self, kid: str) -> bytes | None:
        own = self._keys.get(kid)
        return own if own is not None or self._external is None else self._external.keys.get(kid)

    def _verify(self, token: str) -> Principal:
        claims, kid, key = self._claims(token)
        return Principal(
            tenant=claims["tenant"],
            sub=claims["sub"],
            jti=claims["jti"],
            issuer=claims["iss"],
            scopes=frozenset(claims["scope"].split(" ")).intersection(SCOPES),
            expires_s=int(claims["exp"]),
            kid=kid,
            key=key,
            # Claims of these names are another issuer's own affair.
            kinds=_patterns(claims, "kinds") if kid in self._keys else None,
            nodes=_patterns(claims, "nodes") if kid in self._keys else None,
            token=token if self._keeps_tokens else "",
        )

    def _claims(self, token: str) -> tuple[dict[str, Any], str, bytes]:
        """Return the claims of ``token``, and the name of its key and the key, which is its issuer's."""
        issuer, verifier, external = self._issuer, self._verifier, self._external
        kid = (external.verifier if external else verifier).kid_of(token)
        if external is not None and kid not in self._keys:
            issuer, verifier = external.issuer, external.verifier
        key, now_s = self._key_of(kid), self._now_ms() // 1000
        claims = verifier.verify(
            token, {kid: key}.get, audiences=self._audiences, now_s=now_s, early_s=_EARLY_S
        )
        if key is None or claims["iss"] != issuer:
            raise TokenError(TokenReason.ISSUER)
        return claims, kid, key


def _digest_of(token: str) -> bytes:
    """Return what a token is cached by: a cache of tokens would hold each for as long as the process."""
    return sha256(token.encode("utf-8", "surrogatepass")).digest()


def _patterns(claims: Mapping[str, Any], name: str) -> tuple[str, ...] | None:
    """Return the patterns of a claim that narrows what a token is for; None if it has none."""
    return tuple(claims[name]) if name in claims else None


class AcceptedKeys(Mapping[str, bytes]):
    """The relay's own public keys of 32 bytes by kid, as they change, without those that have ended."""

    def __init__(self, now_ms: ValidityClock) -> None:
        self._now_ms = now_ms
        self._keys: Mapping[str, AcceptedKey] = {}

    def accept(self, keys: Mapping[str, AcceptedKey]) -> AbstractSet[str]:
        """Accept ``keys`` from now on, and no others; return the kids of those that are new.

        An end that was known stays while this process runs: the list may have been restored from a backup.
        """
        new = keys.keys() - self._keys.keys()
        self._keys = {kid: _ended(key, self._keys.get(kid)) for kid, key in keys.items()}
        return new

    def __getitem__(self, kid: str) -> bytes:
        key = self._keys[kid]
        if key.until_ms is not None and key.until_ms <= self._now_ms():
            raise KeyError(kid)
        return key.public_key

    def __iter__(self) -> Iterator[str]:
        return (kid for kid in self._keys if kid in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _ended(key: AcceptedKey, before: AcceptedKey | None) -> AcceptedKey:
    """Return ``key`` with the earlier end of both."""
    known = [each.until_ms for each in (key, before) if each is not None and each.until_ms is not None]
    return key._replace(until_ms=min(known, default=None))
