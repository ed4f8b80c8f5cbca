"""The authorization server: what clients ask for, the codes that answer it, and the tokens that codes become.

OAuth 2.1: codes with PKCE by S256 alone, the resource of RFC 8707, the issuer of RFC 9207. A code is kept in
memory, good once and for a minute; used a second time, it ends what it has become. Must not show a page, nor
know how a person has proven who it is.
"""

import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from typing import Any

from attrs import define, field, frozen

from relay.auth.agent_tokens import Principal, TokenIssuer
from relay.limits.rate_limits import Allowance, KeyedLimiters
from relay.sign_in.assertions import ASSERTION_TYPE, Assertions
from relay.sign_in.clients import NONE, ClientError, Clients, OAuthClient, agent_name
from relay.sign_in.consent import ACCESS_MS, FormValues, may_still_give
from relay.sign_in.incoming import SignInRefusedError
from relay.sign_in.redeeming import Redeem
from relay.sign_in.redirects import place_of
from relay.state.grants import Choice, Grant, Grants, NewTokens, RefreshError, grant_of
from relay.state.people import PeopleLedger, Person, digest_of
from relay.state.tokens import IssuedToken, IssuedTokens
from schemas.addresses import mcp_url, mcp_urls
from schemas.error_roots import PeerError, StateError
from schemas.errors import ToolError
from schemas.keys import base64url
from schemas.kinds import Kind
from schemas.tokens import TokenError

CODE_MS = 60_000
_REPLAY_MS = 600_000
_REDEEMED_MS = 7 * 86_400_000
"""For how long the relays of a fleet know that a refresh token was redeemed: a backup may be so old."""
OF_A_PERSON = Allowance(rate=256 / 3600, burst=256, concurrency=1)
"""The access tokens of all clients of a person. Relays share an entry of each: of a revoked one for good."""
_MAX_CODES = 4096
_CHALLENGE = re.compile(r"[A-Za-z0-9_-]{43}")
_VERIFIER = re.compile(r"[A-Za-z0-9._~-]{43,128}")
_SCOPE = re.compile(r"[\x21\x23-\x5B\x5D-\x7E]+( [\x21\x23-\x5B\x5D-\x7E]+)*")
_MAX_SCOPE, _MAX_STATE, _MAX_SHOWN = 2048, 4096, 16
_ONCE = (
    "client_id",
    "redirect_uri",
    "response_type",
    "state",
    "code_challenge",
    "code_challenge_method",
    "scope",
)


class OAuthError(PeerError):
    """A request is refused. ``code`` is that of OAuth; the text, our own, is for the client's developer.

    ``ended``: what has ended by the request, to be recorded.
    """

    def __init__(self, code: str, text: str, status: int = 400, ended: Sequence[Grant] = ()) -> None:
        super().__init__(text)
        self.code, self.status, self.ended = code, status, ended


Answer = tuple[dict[str, Any], Sequence[Grant]]
"""The members of the answer to a token request, and the grants that have ended by it."""
ToThread = Callable[..., Awaitable[Any]]
"""Returns what a function returns that waits for files; raises SignInRefusedError if too many wait."""


@frozen
class AuthorizationRequest:
    """What a client asks for, to be sent to ``redirect_uri``: checked, but for the person's answer.

    Attributes:
        resource: which of the relay's it wants to use.
        scopes: what it would like, of whatever server: for the person to read.
    """

    client: OAuthClient
    redirect_uri: str
    state: str
    challenge: str
    resource: str
    scopes: tuple[str, ...]

    @property
    def can_be_remembered(self) -> bool:
        """Whether its document proves the client, at an https URL: any program can be at a loopback one."""
        return bool(self.client.origin) and self.redirect_uri.startswith("https://")


@frozen
class _Code:
    asked: AuthorizationRequest
    person: str
    choice: Choice
    remember: bool
    until_ms: int


@define(eq=False, repr=False)
class _Redeemed:
    """When a code was redeemed, for which grant, and whether it was sent again since."""

    at_ms: int
    grant_id: str
    again: bool = False


@define(eq=False, repr=False, kw_only=True)
class AuthorizationServer:
    """Answers clients. ``issuer`` is the relay's public URL; ``sign`` returns what signs with its key.

    ``identify`` returns of whom a token is that the relay accepts, and raises TokenError.
    ``longest_ms``: for how long what a person of a provider has given is refreshed.
    ``redeem`` decides of a code or refresh token that is good here whether another relay has redeemed it.
    """

    _issuer: str
    _clients: Clients
    _assertions: Assertions
    _people: PeopleLedger
    _grants: Grants
    _issued: IssuedTokens
    _sign: Callable[[], TokenIssuer]
    _identify: Callable[[str], Principal]
    _redeem_once: Redeem
    _kinds: Iterable[Kind]
    _longest_ms: int
    _limits: KeyedLimiters[str]
    _new_id: Callable[[], str]
    _now_ms: Callable[[], int]
    _random_bytes: Callable[[int], bytes]
    _codes: OrderedDict[str, _Code] = field(init=False, factory=OrderedDict)
    _redeemed: OrderedDict[str, _Redeemed] = field(init=False, factory=OrderedDict)
    _resources: frozenset[str] = field(init=False)

    def __attrs_post_init__(self) -> None:
        # Clients name the path that their user pasted, or the origin, with and without a slash.
        known = {*mcp_urls(self._issuer), self._issuer}
        self._resources = frozenset(known | {f"{url}/" for url in known})

    # --- authorize ---------------------------------------------------------------------------------------

    async def client_of(self, query: FormValues) -> tuple[OAuthClient, str]:
        """Return the client of an authorization request, and the redirect URI that it may have.

        Raises:
            ClientError: there is none: the person is told, and nothing is sent anywhere.
        """
        client = await self._clients.find(query.one("client_id"))
        uri = query.one("redirect_uri")
        if not uri and len(client.redirect_uris) == 1 and not query.all("redirect_uri"):
            uri = client.redirect_uris[0]
        if not client.may_redirect_to(uri):
            raise ClientError(
                "invalid_request", "The client asks for an answer to where it is not registered for."
            )
        return client, uri

    def read_request(self, query: FormValues, client: OAuthClient, redirect_uri: str) -> AuthorizationRequest:
        """Return what is asked for.

        Raises:
            OAuthError: it cannot be had; that is sent to the client.
        """
        if (repeated := query.repeated(_ONCE)) is not None:
            raise OAuthError("invalid_request", f"{repeated} was sent twice.")
        if query.one("response_type") != "code":
            raise OAuthError("unsupported_response_type", "response_type is code.")
        if query.one("code_challenge_method") != "S256" or not _CHALLENGE.fullmatch(
            query.one("code_challenge")
        ):
            raise OAuthError("invalid_request", "Send a code_challenge with code_challenge_method S256.")
        scope, state = query.one("scope"), query.one("state")
        if len(state) > _MAX_STATE:
            raise OAuthError("invalid_request", "state is too long.")
        if scope and (len(scope) > _MAX_SCOPE or not _SCOPE.fullmatch(scope)):
            raise OAuthError("invalid_scope", "scope is a list of words.")
        resource = self._resource(query) or mcp_url(self._issuer)
        shown = tuple(dict.fromkeys(scope.split()))[:_MAX_SHOWN]
        return AuthorizationRequest(client, redirect_uri, state, query.one("code_challenge"), resource, shown)

    def _resource(self, values: FormValues) -> str:
        """Return the resource that is asked for, without a slash at its end; empty if none is.

        Raises:
            OAuthError: it is not of this relay.
        """
        if not all(resource in self._resources for resource in values.all("resource")):
            raise OAuthError(
                "invalid_target", f"resource is one of {', '.join(sorted(mcp_urls(self._issuer)))}."
            )
        return values.all("resource")[0].rstrip("/") if values.all("resource") else ""

    def answer(self, asked_state: str, members: Mapping[str, str]) -> dict[str, str]:
        """Return ``members`` as an answer is sent to the client: with its state, and who answers."""
        return {**members, **({"state": asked_state} if asked_state else {}), "iss": self._issuer}

    def remembered(self, asked: AuthorizationRequest, person: Person) -> Grant | None:
        """Return what ``person`` has given to the same client before, to be given again without asking."""
        if not asked.can_be_remembered:
            return None
        for grant in self._grants.read().live_of(person.id, self._now_ms()):
            same = (grant.client_id, grant.redirect) == (asked.client.id, place_of(asked.redirect_uri))
            if grant.remember and same and self._may(grant) and {*asked.scopes} <= {*grant.asked}:
                return grant
        return None

    def code_for(self, asked: AuthorizationRequest, person: Person, choice: Choice, *, remember: bool) -> str:
        code = base64url(self._random_bytes(32))
        now = self._now_ms()
        for old in [key for key, each in self._codes.items() if each.until_ms <= now]:
            del self._codes[old]
        if len(self._codes) >= _MAX_CODES:
            self._codes.popitem(last=False)
        self._codes[digest_of(code)] = _Code(asked, person.id, choice, remember, now + CODE_MS)
        return code

    # --- token -------------------------------------------------------------------------------------------

    async def tokens(self, form: FormValues, on_thread: ToThread) -> Answer:
        """Return the answer to a token request, and the grants that have ended by it.

        Raises:
            OAuthError: it is refused.
            SignInRefusedError: the fleet's other relays are not reached, or too many wait. This and what
                follows can be repeated.
            StateError, OSError: a file cannot be used.
        """
        names = ("grant_type", "code", "redirect_uri", "client_id", "code_verifier", "refresh_token")
        if (repeated := form.repeated(names)) is not None:
            raise OAuthError("invalid_request", f"{repeated} was sent twice.")
        client_id, asserted = await self._proven(form)
        match form.one("grant_type"):
            case "authorization_code":
                return await self._redeemed_code(form, client_id, on_thread, asserted=asserted)
            case "refresh_token":
                self._resource(form)
                token = form.one("refresh_token")
                return await self._refreshed(token, client_id, on_thread, asserted=asserted)
            case _:
                raise OAuthError(
                    "unsupported_grant_type", "grant_type is authorization_code or refresh_token."
                )

    async def _redeemed_code(
        self, form: FormValues, client_id: str, on_thread: ToThread, *, asserted: bool
    ) -> Answer:
        digest = digest_of(form.one("code"))
        if (replayed := self._redeemed.get(digest)) is not None:
            replayed.again = True  # it may not have become a grant yet
            raise await on_thread(self._end_replayed, replayed.grant_id, "code")
        code = self._redeem(digest, form, client_id, asserted=asserted)
        redeemed = self._redeemed[digest] = _Redeemed(self._now_ms(), self._new_id())
        try:
            if not await self._redeem_once(digest, self._now_ms() + _REPLAY_MS):
                raise OAuthError("invalid_grant", "The code was used before.")
            begun: Answer = await on_thread(partial(self._begin, code, redeemed, asserted=asserted))
        except (SignInRefusedError, StateError, OSError):
            # Nothing has come of it: the client can try again, while the code is good.
            if not redeemed.again:
                del self._redeemed[digest]
                self._codes[digest] = code
            raise
        return begun

    async def _refreshed(self, token: str, client_id: str, on_thread: ToThread, *, asserted: bool) -> Answer:
        try:
            found = self._grants.presented(token, client_id)
        except RefreshError as error:
            raise OAuthError("invalid_grant", f"No: {error}.") from None
        if found is not None and (asserted or not found[0].asserts):
            grant, what = found
            until_ms = min(grant.until_ms, self._now_ms() + _REDEEMED_MS)
            if not await self._redeem_once(what, until_ms):
                raise await on_thread(self._end_replayed, grant.id, "refresh token")
        refreshed: Answer = await on_thread(partial(self._refresh, token, client_id, asserted=asserted))
        return refreshed

    async def _proven(self, form: FormValues) -> tuple[str, bool]:
        """Return the id of the client that has sent ``form``, and whether it has proven that by a key.

        Raises:
            OAuthError: it has not.
        """
        client_id = form.one("client_id")
        if form.all("client_secret"):
            raise OAuthError("invalid_client", "Clients have no secrets here.", 401)
        if not form.all("client_assertion"):
            if not client_id:
                raise OAuthError("invalid_client", "Send client_id.", 401)
            return client_id, False
        if form.one("client_assertion_type") != ASSERTION_TYPE:
            raise OAuthError("invalid_client", f"client_assertion_type is {ASSERTION_TYPE}.", 401)
        try:
            assertion = form.one("client_assertion")
            client_id = client_id or Assertions.subject_of(assertion)
            self._check_allowed(client_id)
            client = await self._clients.find(client_id)
            self._assertions.verify(assertion, client.id, await self._clients.keys_of(client))
        except ClientError as error:
            raise OAuthError("invalid_client", str(error), 401) from None
        return client.id, True

    def _check_allowed(self, client_id: str) -> None:
        """Return if a person has allowed that client something: for no other is anything fetched.

        Raises:
            ClientError: there is no grant.
        """
        known = {code.asked.client.id for code in self._codes.values()}
        if client_id not in known | {grant.client_id for grant in self._grants.read().by_id.values()}:
            raise ClientError("invalid_client", "No person has allowed this client anything.")

    def _end_replayed(self, grant_id: str, what: str) -> OAuthError:
        # Another has seen it (RFC 6749 section 4.1.2), or this relay's files are older than the stream.
        ended = self._grants.end(lambda grant: grant.id == grant_id)
        return OAuthError("invalid_grant", f"The {what} was used before.", ended=ended)

    def _redeem(self, digest: str, form: FormValues, client_id: str, *, asserted: bool) -> _Code:
        now = self._now_ms()
        while self._redeemed and next(iter(self._redeemed.values())).at_ms <= now - _REPLAY_MS:
            self._redeemed.popitem(last=False)
        code = self._codes.pop(digest, None)
        if code is None or code.until_ms <= now:
            raise OAuthError("invalid_grant", "The code is not known, or has expired.")
        asked, verifier = code.asked, form.one("code_verifier")
        if asked.client.id != client_id or (NONE not in asked.client.methods and not asserted):
            raise OAuthError("invalid_grant", "The code is for another client.")
        if not {*form.all("redirect_uri")} <= {asked.redirect_uri}:
            raise OAuthError("invalid_grant", "The code was sent to another redirect_uri.")
        if not _VERIFIER.fullmatch(verifier) or challenge_of(verifier) != asked.challenge:
            raise OAuthError("invalid_grant", "code_verifier is not that of the code's challenge.")
        if self._resource(form) not in {asked.resource, ""}:
            raise OAuthError("invalid_target", "The code is for another resource.")
        return code

    def _begin(self, code: _Code, redeemed: _Redeemed, *, asserted: bool) -> Answer:
        now, client = self._now_ms(), code.asked.client
        person = self._people.read().active(code.person)
        if person is None:
            raise OAuthError("invalid_grant", "The person may not sign in any more.")
        grant = grant_of(
            {
                "id": redeemed.grant_id,
                "person": person.id,
                "client_id": client.id,
                "client_name": client.name,
                "origin": client.origin,
                "redirect": place_of(code.asked.redirect_uri),
                "sub": agent_name(person.name, client),
                "asserts": asserted,
                "remember": code.remember,
                "asked": code.asked.scopes,
                "made_ms": now,
            },
            code.choice,
        )
        try:
            new = self._grants.begin(
                grant,
                self._signed,
                may=lambda: not redeemed.again and self._may(grant),
                refreshes=grant.until_ms > now + ACCESS_MS,
            )
        except RefreshError as error:
            raise OAuthError("invalid_grant", f"No: {error}.") from None
        return self._tokens(new)

    def _refresh(self, token: str, client_id: str, *, asserted: bool) -> Answer:
        try:
            return self._tokens(
                self._grants.refresh(token, client_id, self._signed, asserted=asserted, may=self._may)
            )
        except RefreshError as error:
            if error.retry_after_ms is not None:
                raise SignInRefusedError(
                    429, "The client refreshes too often.", "refreshes", error.retry_after_ms
                ) from None
            raise OAuthError("invalid_grant", f"No: {error}.", ended=error.ended) from None

    def _may(self, grant: Grant) -> bool:
        person = self._people.read().giver(grant.person)
        if person is None or not may_still_give(person, self._kinds, grant.choice):
            return False
        return person.provider is None or self._now_ms() < grant.made_ms + self._longest_ms

    def _signed(self, grant: Grant) -> tuple[str, int]:
        try:  # one at a time: the file of grants is locked
            self._limits.charge(grant.person, OF_A_PERSON, 1)
        except ToolError as error:
            text = "The clients of this person get too many tokens."
            raise SignInRefusedError(429, text, "tokens", error.retry_after_ms) from None
        now = self._now_ms()
        end = min(now + ACCESS_MS, grant.until_ms)
        jti = self._new_id()
        issued = IssuedToken(
            jti,
            grant.tenant,
            grant.sub,
            (
                *grant.scopes,
                *(f"kinds:{each}" for each in grant.kinds or ()),
                *(f"nodes:{each}" for each in grant.nodes or ()),
            ),
            mcp_url(self._issuer),
            now,
            end,
        )
        self._issued.add(issued)
        return jti, end

    def _tokens(self, new: NewTokens) -> Answer:
        grant, now_s = new.grant, self._now_ms() // 1000
        jti, end_ms = grant.access[-1]
        token = self._sign().issue(
            sub=grant.sub,
            tenant=grant.tenant,
            scopes=list(grant.scopes),
            now_s=now_s,
            ttl_s=max(1, end_ms // 1000 - now_s),
            jti=jti,
            kinds=grant.kinds or (),
            nodes=grant.nodes or (),
        )
        answer = {
            "access_token": token,
            "token_type": "Bearer",
            "expires_in": max(1, end_ms // 1000 - now_s),
            "scope": " ".join(grant.scopes),
        }
        return answer | ({"refresh_token": new.refresh} if new.refresh else {}), new.ended

    # --- revoke ------------------------------------------------------------------------------------------

    async def revoke(self, form: FormValues, on_thread: ToThread) -> Sequence[Grant]:
        """End the grant of the token in ``form``, a refresh or an access token, and return it: RFC 7009.

        Raises:
            OAuthError: the client has not proven which it is.
            SignInRefusedError, StateError, OSError: as of ``tokens``.
        """
        client_id, _ = await self._proven(form)
        token = form.one("token")
        try:
            jti = self._identify(token).jti
        except TokenError:
            jti = ""  # a refresh token, or an unknown one: that is no error (section 2.2)
        ended: Sequence[Grant] = await on_thread(self._grants.end_by_token, token, jti, client_id)
        return ended


def challenge_of(verifier: str) -> str:
    """Return the S256 challenge of ``verifier`` (RFC 7636).

    >>> challenge_of("dBjftJeZ4CVP-mB92K27uhbUJU1p1r_wW1gFWFOEjXk")
    'E9Melhoa2OwvFrEMTJguCHaoeK1t8URWbuGJSstw-cM'
    """
    return base64url(sha256(verifier.encode("ascii")).digest())
