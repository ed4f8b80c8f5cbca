"""People who sign in at an OpenID Connect provider: what their claims let them be, decided at each sign-in.

What begins in one browser ends there: its state, nonce and verifier are made of a cookie of that browser by a
key of the process, so that an answer is worth nothing in another one. Claims that give nothing end what they
gave before. Must not speak to the provider by itself, and must not read a passkey.
"""

import asyncio
import hmac
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from attrs import define, field
from structlog.typing import FilteringBoundLogger

from relay.audit.writer import AuditWriter
from relay.auth.openid_provider import OpenidError, OpenidProvider
from relay.settings.openid import OpenidConfig
from relay.sign_in.authorization import challenge_of
from relay.sign_in.consent import FormValues, may_still_give
from relay.sign_in.incoming import SignInRefusedError
from relay.sign_in.pages import ATTEMPT_MS
from relay.state.grants import Grant, Grants
from relay.state.people import PeopleError, PeopleLedger, Person, digest_of
from schemas.keys import base64url
from schemas.kinds import Kind
from schemas.text import printable

_MAX_ATTEMPTS = 2048
_MAX_CODE = 4096
MAX_AT_ONCE = 16
"""So many answers of the provider are redeemed at once."""
_AGAIN = "This sign-in was begun in another browser, or too long ago: begin again in your client."
_ONCE = ("state", "code", "iss", "error")


class SignedIn(NamedTuple):
    """Who has signed in, what the session is held to (``Person.proofs``), and which page goes on."""

    person: Person
    proof: bytes
    back: str


@define(eq=False, repr=False, kw_only=True)
class ProviderSignIn:
    """Signs people in at ``provider``, by the rules of ``config``; ``label`` is what its button says."""

    _config: OpenidConfig
    _provider: OpenidProvider
    _people: PeopleLedger
    _grants: Grants
    _kinds: Iterable[Kind]
    _audit: AuditWriter
    _log: FilteringBoundLogger
    _now_ms: Callable[[], int]
    _random_bytes: Callable[[int], bytes]
    label: str = field(init=False)
    _key: bytes = field(init=False)
    _attempts: OrderedDict[str, tuple[int, str]] = field(init=False, factory=OrderedDict)
    _answering: int = field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        self._key = self._random_bytes(32)
        self.label = urlsplit(self._config.issuer).hostname or ""

    async def begin(self, back: str) -> tuple[str, str]:
        """Return where the browser is sent, and the cookie that it keeps meanwhile; it comes ``back``.

        Raises:
            SignInRefusedError: that is not possible now.
        """
        cookie = base64url(self._random_bytes(32))
        try:
            url = await self._provider.authorization_url(
                state=self._made_of(cookie, "state"),
                nonce=self._made_of(cookie, "nonce"),
                challenge=challenge_of(self._made_of(cookie, "verifier")),
                scopes=self._config.scopes,
            )
        except OpenidError as error:
            raise self._failed(error) from None
        now = self._now_ms()
        while self._attempts and next(iter(self._attempts.values()))[0] <= now:
            self._attempts.popitem(last=False)
        if len(self._attempts) >= _MAX_ATTEMPTS:
            self._attempts.popitem(last=False)
        self._attempts[digest_of(cookie)] = (now + ATTEMPT_MS, back)
        return url, cookie

    async def answered(self, query: FormValues, cookie: str | None) -> SignedIn:
        """Return who has come back.

        Raises:
            SignInRefusedError: it is not proven, or the person may not sign in.
            LedgerError, OSError: the list of people cannot be used.
        """
        if self._answering >= MAX_AT_ONCE:
            raise SignInRefusedError.too_many()
        cookie = cookie or ""
        until, back = self._attempts.pop(digest_of(cookie), (0, ""))
        state = query.one("state").encode("utf-8", "surrogatepass")
        if until <= self._now_ms() or not hmac.compare_digest(state, self._made_of(cookie, "state").encode()):
            raise SignInRefusedError(403, _AGAIN, "another_browser")
        if query.repeated(_ONCE) is not None:
            raise SignInRefusedError(400, "The provider's answer is malformed.", "malformed")
        self._answering += 1
        try:
            person = await self._person_of(query, cookie)
        finally:
            self._answering -= 1
        return SignedIn(person, person.proofs[0], back)

    async def _person_of(self, query: FormValues, cookie: str) -> Person:
        """Redeem the provider's answer, and return whom its claims are of.

        Raises:
            SignInRefusedError: they allow no sign-in, or the provider has given none.
        """
        try:
            await self._provider.check_answer(query.all("iss"))
            if query.all("error") or not 0 < len(query.one("code")) <= _MAX_CODE:
                code = printable(query.one("error") or "no code", 64)
                self._log.warning("the provider has refused a sign-in", error=code)
                raise SignInRefusedError(403, f"{self.label} has not signed you in.", "provider_refused")
            claims = await self._provider.claims(
                code=query.one("code"),
                verifier=self._made_of(cookie, "verifier"),
                nonce=self._made_of(cookie, "nonce"),
            )
        except OpenidError as error:
            raise self._failed(error) from None
        person = await asyncio.to_thread(self._decided, claims)
        if person is None:
            self._log.warning("claims allow no sign-in", subject=printable(str(claims["sub"]), 64))
            text = f"{self.label} knows you, but its groups do not let you use this relay: ask its operator."
            raise SignInRefusedError(403, text, "claims")
        return person

    def _decided(self, claims: Mapping[str, Any]) -> Person | None:
        """Return who has these claims, as they are now, if they allow that; end what they no longer do.

        Raises:
            SignInRefusedError: the operator has revoked the person.
        """
        subject, allowed = str(claims["sub"]), self._config.allowed(claims)
        if allowed is None:
            known = self._people.withdraw(subject)
            self._end(lambda grant: known is not None and grant.person == known.id)
            return None
        called = claims.get(self._config.name_claim)
        try:
            person = self._people.admit(subject, called if isinstance(called, str) else subject, *allowed)
        except PeopleError:
            raise SignInRefusedError(403, "The operator of this relay has revoked you.", "revoked") from None

        def is_too_much(grant: Grant) -> bool:
            return grant.person == person.id and not may_still_give(person, self._kinds, grant.choice)

        self._end(is_too_much)
        return person

    def _end(self, chosen: Callable[[Grant], bool]) -> None:
        for grant in self._grants.end(chosen):
            self._audit.write(event="grant_ended", sub=grant.sub, tenant=grant.tenant, grant=grant.id)

    def _failed(self, error: OpenidError) -> SignInRefusedError:
        self._log.warning(
            "the provider of people.oidc cannot be used", issuer=self._config.issuer, reason=str(error)
        )
        text = f"Signing in at {self.label} is not possible: the operator sees why in the relay's log."
        return SignInRefusedError(502, text, "provider")

    def _made_of(self, cookie: str, purpose: str) -> str:
        return base64url(
            hmac.digest(self._key, f"{purpose}\0{cookie}".encode("utf-8", "surrogatepass"), sha256)
        )
