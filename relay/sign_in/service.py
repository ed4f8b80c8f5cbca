"""The routes of sign-in: people's pages, and the endpoints of the authorization server.

All that arrives is from strangers: it is metered by address before it is read, read within bounds of bytes
and time, and a form is taken only from our own pages (its Origin, and what the page was given). Must not
decide what is allowed; must not write a token, a code or a link anywhere but into the answer.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl

from attrs import define, field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from structlog.typing import FilteringBoundLogger

from relay.audit.log import AuditUnavailableError
from relay.audit.refusal_counts import RefusalCounter, RefusalEvent
from relay.audit.writer import AuditWriter
from relay.observability.ascii_json import members_of
from relay.observability.metrics import Metrics
from relay.sign_in.authorization import AuthorizationRequest, AuthorizationServer, OAuthError
from relay.sign_in.clients import MAX_DOCUMENT, ClientError, Clients, OAuthClient
from relay.sign_in.consent import (
    LOOK_WITHOUT_LOGS,
    USUAL_LIFETIME,
    WORDS,
    ChoiceError,
    FormValues,
    Offer,
    Tags,
    chosen,
    may_still_give,
    offer_to,
)
from relay.sign_in.incoming import MAX_BODY, AddressMeter, SignInRefusedError, address_of, read_body
from relay.sign_in.known_clients import known_client
from relay.sign_in.metadata import AUTHORIZE, REGISTER, REVOKE, TOKEN
from relay.sign_in.pages import (
    ATTEMPT_MS,
    COMMON,
    ELSEWHERE,
    FROM_ELSEWHERE,
    SIGN_IN,
    SIGN_OUT,
    SignInPages,
)
from relay.sign_in.passkeys import SESSION_MS, BrowserSession, PasskeyError, Passkeys
from relay.sign_in.redirects import target_of, with_answer
from relay.state.grants import Choice, Grant, Grants
from relay.state.people import INVITATION_PATH as INVITATION
from relay.state.people import InvitationError, Person
from schemas.error_roots import StateError
from schemas.kinds import Kind
from schemas.strict_json import StrictJsonError, loads
from schemas.times import iso

if TYPE_CHECKING:
    from relay.sign_in.provider import ProviderSignIn

COOKIE, ATTEMPT_COOKIE = "__Host-edge-session", "__Host-edge-attempt"
_MAX_QUERY = 8 * 1024
_MAX_WAITING = 64
"""How many requests wait for a file at once."""
_T = TypeVar("_T")
_NO_STORE = {"cache-control": "no-store", "pragma": "no-cache"}


@define(eq=False, repr=False, kw_only=True)
class SignIn:
    """Serves sign-in for the relay at ``public_url``. ``tenants``: those that an operator of all has."""

    _public_url: str
    _metadata: Mapping[str, Any]
    _server: AuthorizationServer
    _clients: Clients
    _passkeys: Passkeys
    _grants: Grants
    _kinds: Iterable[Kind]
    _tenants: Callable[[], Iterable[str]]
    _tags: Tags
    _audit: AuditWriter
    _refusals: RefusalCounter
    _metrics: Metrics
    _log: FilteringBoundLogger
    _now_ms: Callable[[], int]
    _meter: AddressMeter
    _longest_ms: int
    _elsewhere: "ProviderSignIn | None" = None
    _pages: SignInPages = field(init=False)
    _waiting: int = field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        self._pages = SignInPages(self._public_url)

    def application(self, more: Sequence[Route]) -> tuple[Starlette, frozenset[str]]:
        """Return what serves, and the paths that it serves: with ``more``, which are of others."""
        pages: tuple[tuple[str, str, Callable[[Request], Awaitable[Response]]], ...] = (
            ("GET", AUTHORIZE, self._show_authorization),
            ("POST", AUTHORIZE, self._take_authorization),
            ("GET", SIGN_IN, self._show_account),
            ("POST", f"{SIGN_IN}/end", self._end_grant),
            ("POST", SIGN_OUT, self._sign_out),
            ("GET", INVITATION, self._show_invitation),
        )
        if (elsewhere := self._elsewhere) is not None:
            pages += (
                ("GET", ELSEWHERE, partial(self._go_elsewhere, elsewhere)),
                ("GET", FROM_ELSEWHERE, partial(self._come_back, elsewhere)),
            )
        programs = (
            (f"{SIGN_IN}/options", self._request_options),
            (f"{SIGN_IN}/passkey", self._sign_in),
            (f"{INVITATION}/options", self._creation_options),
            (f"{INVITATION}/passkey", self._make_passkey),
        )
        clients = ((TOKEN, self._token), (REGISTER, self._register), (REVOKE, self._revoke))
        routes = [
            *(Route(path, partial(self._page, serve), methods=[method]) for method, path, serve in pages),
            *(Route(path, partial(self._json, serve), methods=["POST"]) for path, serve in programs),
            *(Route(path, partial(self._endpoint, serve), methods=["POST"]) for path, serve in clients),
            *more,
        ]
        return self._pages.application(self._metadata, routes)

    # --- what holds of every request ---------------------------------------------------------------------

    async def _served(
        self,
        request: Request,
        serve: Callable[[Request], Awaitable[Response]],
        fail: Callable[[SignInRefusedError], Response],
    ) -> Response:
        address = "unknown"
        try:
            address = self._meter.admit(request)
            return await serve(request)
        except SignInRefusedError as refused:
            error = refused
        except PasskeyError as refused:
            error = SignInRefusedError(
                403, "This passkey is not known here, or was not used in time.", str(refused)
            )
        except ClientError as refused:
            error = SignInRefusedError(400, str(refused), refused.code)
        except InvitationError as refused:
            error = SignInRefusedError(403, f"No passkey was made: {refused}.", "link")
        except (AuditUnavailableError, StateError, OSError) as failed:
            self._log.error("sign-in is not possible", reason=str(failed))
            error = SignInRefusedError(
                503, "The relay cannot sign anybody in at present: try again later.", "state"
            )
        self._metrics.sign_ins.labels("refused").inc()
        self._refusals.count(RefusalEvent.SIGN_IN_REFUSED, address, error.reason)
        return fail(error)

    async def _page(self, serve: Callable[[Request], Awaitable[Response]], request: Request) -> Response:
        def fail(error: SignInRefusedError) -> Response:
            return self._pages.page(
                "error",
                error.status,
                text=error.text,
                advice="Close this page, and begin again in your client.",
            )

        async def checked(request: Request) -> Response:
            if request.method == "POST":
                self._check_origin(request)
            return await serve(request)

        return await self._served(request, checked, fail)

    async def _json(
        self, serve: Callable[[Request, Mapping[str, Any]], Awaitable[Response]], request: Request
    ) -> Response:
        def fail(error: SignInRefusedError) -> Response:
            return JSONResponse({"error": error.reason, "message": error.text}, error.status, COMMON)

        async def checked(request: Request) -> Response:
            self._check_origin(request)
            if _media_type(request) != "application/json":
                raise SignInRefusedError(415, "Send application/json.", "media_type")
            try:
                value = loads(await read_body(request, MAX_BODY), max_bytes=MAX_BODY)
            except StrictJsonError:
                value = None
            if not isinstance(value, dict):
                raise SignInRefusedError(400, "Send a JSON object.", "malformed")
            return await serve(request, value)

        return await self._served(request, checked, fail)

    async def _endpoint(self, serve: Callable[[Request], Awaitable[Response]], request: Request) -> Response:
        def fail(error: SignInRefusedError) -> Response:
            code = {429: "temporarily_unavailable", 503: "temporarily_unavailable"}.get(
                error.status, "invalid_request"
            )
            headers = dict(_NO_STORE)
            if error.retry_after_ms is not None:
                headers["retry-after"] = str(-(-error.retry_after_ms // 1000))
            return JSONResponse({"error": code, "error_description": error.text}, error.status, headers)

        async def answered(request: Request) -> Response:
            try:
                return await serve(request)
            except (OAuthError, ClientError) as refused:
                if isinstance(refused, OAuthError):
                    await self._record_ended(refused.ended)
                self._metrics.sign_ins.labels("refused").inc()
                address = address_of(request)
                self._refusals.count(RefusalEvent.SIGN_IN_REFUSED, address, refused.code)
                members = {"error": refused.code, "error_description": str(refused)}
                return JSONResponse(members, getattr(refused, "status", 400), _NO_STORE)

        return await self._served(request, answered, fail)

    def _check_origin(self, request: Request) -> None:
        """Return if a page of ours has sent the request.

        Raises:
            SignInRefusedError: another one may have.
        """
        origins = request.headers.getlist("origin")
        site = request.headers.get("sec-fetch-site", "same-origin")
        if origins != [self._public_url] or site != "same-origin":
            raise SignInRefusedError(403, f"This is not from a page of {self._public_url}.", "origin")

    async def _form(self, request: Request) -> FormValues:
        if _media_type(request) != "application/x-www-form-urlencoded":
            raise SignInRefusedError(415, "Send application/x-www-form-urlencoded.", "media_type")
        return _values(await read_body(request, MAX_BODY))

    def _session(self, request: Request) -> tuple[BrowserSession, Person] | None:
        return self._passkeys.session_of(_cookie(request))

    async def _form_of_session(self, request: Request) -> tuple[FormValues, tuple[BrowserSession, Person]]:
        """Return a form, and the session in which it was shown, and whose that is.

        Raises:
            SignInRefusedError: it was shown to another, or never shown.
        """
        form, found = await self._form(request), self._session(request)
        if found is None or form.one("form") != found[0].form:
            raise SignInRefusedError(403, "You are not signed in any more.", "session")
        return form, found

    async def _on_thread(self, work: Callable[..., _T], *arguments: Any) -> _T:
        """Return what ``work`` returns, which waits for files.

        Raises:
            SignInRefusedError: as many others wait as may.
        """
        if self._waiting >= _MAX_WAITING:
            raise SignInRefusedError.too_many()
        self._waiting += 1
        try:
            return await asyncio.to_thread(work, *arguments)
        finally:
            self._waiting -= 1

    async def _record(self, **facts: str) -> None:
        """Record what was done, before it is answered: without holding up the event loop for the disk.

        Raises:
            AuditUnavailableError: it is not recorded.
        """
        await self._audit.record(members_of(facts))

    # --- people ------------------------------------------------------------------------------------------

    async def _show_invitation(self, _request: Request) -> Response:
        return self._pages.page("invitation")

    async def _creation_options(self, _request: Request, value: Mapping[str, Any]) -> Response:
        return JSONResponse(self._passkeys.creation(_text(value, "link")), headers=COMMON)

    async def _make_passkey(self, request: Request, value: Mapping[str, Any]) -> Response:
        person, passkey = await self._on_thread(self._passkeys.made, _text(value, "link"), _object(value))
        await self._record(event="passkey_made", sub=person.name, tenant=person.tenant)
        return await self._signed_in(request, person, passkey, _name_of(person))

    async def _request_options(self, _request: Request, _value: Mapping[str, Any]) -> Response:
        return JSONResponse(self._passkeys.request(), headers=COMMON)

    async def _sign_in(self, request: Request, value: Mapping[str, Any]) -> Response:
        person, passkey = await self._on_thread(self._passkeys.proven, _object(value))
        return await self._signed_in(request, person, passkey, _name_of(person))

    async def _signed_in(self, request: Request, person: Person, proof: bytes, answer: Response) -> Response:
        address = address_of(request)
        await self._record(event="signed_in", sub=person.name, tenant=person.tenant, source=address)
        self._metrics.sign_ins.labels("signed_in").inc()
        self._meter.signed_in(address, person.id)
        # A session that the browser had before is another's, or none: it is not gone on with.
        self._passkeys.end_session(_cookie(request))
        _set_cookie(answer, COOKIE, self._passkeys.begin_session(person, proof), SESSION_MS)
        return answer

    def _ask_to_sign_in(self, request: Request, client: str) -> Response:
        query = request.scope["query_string"].decode("ascii", "replace")
        return self._pages.page(
            "sign_in",
            client=client,
            passkeys=self._elsewhere is None or self._passkeys.are_offered(),
            elsewhere=self._elsewhere.label if self._elsewhere is not None else "",
            elsewhere_url=f"{ELSEWHERE}?{query}" if client else ELSEWHERE,
        )

    async def _go_elsewhere(self, elsewhere: "ProviderSignIn", request: Request) -> Response:
        """Send the browser to the provider: from our page alone, so that no other site begins a sign-in."""
        query = _query_text(request)
        if request.headers.get("sec-fetch-site", "same-origin") != "same-origin":
            return RedirectResponse(f"{AUTHORIZE}?{query}" if query else SIGN_IN, 303, COMMON)
        url, cookie = await elsewhere.begin(f"{AUTHORIZE}?{query}" if query else SIGN_IN)
        answer = Response(status_code=303, headers={**COMMON, "location": url})
        _set_cookie(answer, ATTEMPT_COOKIE, cookie, ATTEMPT_MS)
        return answer

    async def _come_back(self, elsewhere: "ProviderSignIn", request: Request) -> Response:
        found = await elsewhere.answered(_query(request), _cookie(request, ATTEMPT_COOKIE))
        answer = Response(status_code=303, headers={**COMMON, "location": found.back})
        _set_cookie(answer, ATTEMPT_COOKIE, "", 0)
        return await self._signed_in(request, found.person, found.proof, answer)

    async def _show_account(self, request: Request) -> Response:
        if (found := self._session(request)) is None:
            return self._ask_to_sign_in(request, "")
        session, person = found
        grants = [
            {
                "id": grant.id,
                "client_name": grant.client_name,
                "origin": grant.origin,
                "words": ", ".join(WORDS[scope].partition(":")[0] for scope in grant.scopes),
                "until": iso(grant.until_ms)[:16].replace("T", " "),
            }
            for grant in self._grants.read().live_of(person.id, self._now_ms())
        ]
        return self._pages.page("account", person=person, grants=grants, form=session.form)

    async def _end_grant(self, request: Request) -> Response:
        form, (_, person) = await self._form_of_session(request)
        wanted = form.one("grant")

        def is_wanted(grant: Grant) -> bool:
            return grant.id == wanted and grant.person == person.id

        await self._record_ended(await self._on_thread(self._grants.end, is_wanted))
        return RedirectResponse(SIGN_IN, 303, COMMON)

    async def _record_ended(self, grants: Sequence[Grant]) -> None:
        for grant in grants:
            await self._record(event="grant_ended", sub=grant.sub, tenant=grant.tenant, grant=grant.id)

    async def _sign_out(self, request: Request) -> Response:
        await self._form_of_session(request)
        self._passkeys.end_session(_cookie(request))
        answer = RedirectResponse(SIGN_IN, 303, COMMON)
        answer.delete_cookie(COOKIE, path="/", secure=True, httponly=True, samesite="lax")
        return answer

    # --- authorize ---------------------------------------------------------------------------------------

    async def _show_authorization(self, request: Request) -> Response:
        found = self._session(request)
        if found is None:
            # Nothing is fetched for a stranger.
            client_id = _query(request).one("client_id")
            return self._ask_to_sign_in(request, self._clients.name_of(client_id))
        query = _query(request)
        client, uri = await self._server.client_of(query)
        asked = self._asked(query, client, uri)
        if isinstance(asked, Response):
            return asked
        if (grant := self._server.remembered(asked, found[1])) is not None:
            choice = grant.choice
            if may_still_give(found[1], self._kinds, choice):
                return await self._given(asked, found[1], choice, remember=True)
        return self._consent(request, asked, found)

    def _asked(self, query: FormValues, client: OAuthClient, uri: str) -> AuthorizationRequest | Response:
        """Return what is asked for; or the answer to the client that it cannot be had.

        Raises:
            SignInRefusedError: as that, where a redirect without a person's act could lead anywhere.
        """
        try:
            return self._server.read_request(query, client, uri)
        except OAuthError as error:
            target = target_of(uri)
            if known_client(client.id) is None and not (target is not None and target.is_loopback):
                # Any stranger can register, or publish, a client that is sent to a place of his choice.
                raise SignInRefusedError(
                    400, f"The client's request cannot be answered: {error}", error.code
                ) from None
            members = {"error": error.code, "error_description": str(error)}
            return _redirected(uri, self._server.answer(query.one("state"), members))

    def _consent(
        self,
        request: Request,
        asked: AuthorizationRequest,
        signed_in: tuple[BrowserSession, Person],
        problem: str = "",
        preset: str = LOOK_WITHOUT_LOGS,
    ) -> Response:
        session, person = signed_in
        offer = self._offer(person)
        target = target_of(asked.redirect_uri)
        if target is None:
            raise SignInRefusedError(
                400, "The client asks for an answer to where none may go.", "invalid_request"
            )
        return self._pages.page(
            "consent",
            400 if problem else 200,
            # A browser holds the redirect that follows to this, too.
            target.source,
            client=asked.client,
            imitates=asked.client.imitates,
            person=person,
            target=target,
            asked=[WORDS.get(scope, scope) for scope in asked.scopes if scope != "offline_access"],
            offer=offer,
            preset=preset,
            preselected=[offer.scopes[0]],
            words_of=WORDS,
            lifetimes=[(name, words) for name, (words, _) in offer.lifetimes.items()],
            lifetime=USUAL_LIFETIME if USUAL_LIFETIME in offer.lifetimes else [*offer.lifetimes][-1],
            may_remember=asked.can_be_remembered,
            form=session.form,
            problem=problem,
            action=f"{AUTHORIZE}?{request.scope['query_string'].decode('ascii', 'replace')}",
        )

    async def _take_authorization(self, request: Request) -> Response:
        form, session = await self._form_of_session(request)
        query = _query(request)
        client, uri = await self._server.client_of(query)
        asked = self._asked(query, client, uri)
        if isinstance(asked, Response):
            return asked
        if form.one("decision") != "allow":
            refused = {"error": "access_denied", "error_description": "The person has refused."}
            return _redirected(uri, self._server.answer(asked.state, refused))
        try:
            choice = chosen(self._offer(session[1]), form, self._now_ms())
        except ChoiceError as error:
            return self._consent(request, asked, session, str(error), form.one("choice"))
        return await self._given(asked, session[1], choice, remember=form.one("remember") == "yes")

    def _offer(self, person: Person) -> Offer:
        return offer_to(person, self._kinds, self._tenants(), self._tags, self._longest_ms)

    async def _given(
        self, asked: AuthorizationRequest, person: Person, choice: Choice, *, remember: bool
    ) -> Response:
        await self._record(
            event="client_allowed",
            sub=person.name,
            tenant=choice.tenant,
            client=asked.client.origin or asked.client.name.encode("ascii", "replace").decode("ascii"),
            scope=" ".join(choice.scopes),
        )
        code = self._server.code_for(asked, person, choice, remember=remember)
        return _redirected(asked.redirect_uri, self._server.answer(asked.state, {"code": code}))

    # --- what programs request ---------------------------------------------------------------------------

    async def _token(self, request: Request) -> Response:
        members, ended = await self._server.tokens(await self._form(request), self._on_thread)
        await self._record_ended(ended)
        self._metrics.sign_ins.labels("token").inc()
        return JSONResponse(members, headers=_NO_STORE)

    async def _register(self, request: Request) -> Response:
        if _media_type(request) != "application/json":
            raise SignInRefusedError(415, "Send application/json.", "media_type")
        body = await read_body(request, MAX_DOCUMENT)
        return JSONResponse(self._clients.register(body), 201, _NO_STORE)

    async def _revoke(self, request: Request) -> Response:
        await self._record_ended(await self._server.revoke(await self._form(request), self._on_thread))
        return Response(status_code=200, headers=_NO_STORE)


def _redirected(uri: str, answer: dict[str, str]) -> Response:
    # Not RedirectResponse, which would quote the URI anew.
    return Response(status_code=303, headers={**COMMON, "location": with_answer(uri, answer)})


def _name_of(person: Person) -> Response:
    return JSONResponse({"name": person.name}, headers=COMMON)


def _set_cookie(answer: Response, name: str, value: str, for_ms: int) -> None:
    answer.set_cookie(
        name, value, max_age=for_ms // 1000, path="/", secure=True, httponly=True, samesite="lax"
    )


def _query(request: Request) -> FormValues:
    return _values(_query_text(request).encode("latin-1"))


def _query_text(request: Request) -> str:
    if len(request.scope["query_string"]) > _MAX_QUERY:
        raise SignInRefusedError(414, "The address is too long.", "too_large")
    return bytes(request.scope["query_string"]).decode("latin-1")


def _values(data: bytes) -> FormValues:
    try:
        pairs = parse_qsl(data.decode("ascii"), keep_blank_values=True, max_num_fields=256, errors="strict")
    except (ValueError, UnicodeDecodeError):
        raise SignInRefusedError(400, "The request is malformed.", "malformed") from None
    return FormValues(pairs)


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _cookie(request: Request, wanted: str = COOKIE) -> str | None:
    """Return our cookie, if it was sent once."""
    found = [
        value
        for line in request.headers.getlist("cookie")
        for name, _, value in (each.strip().partition("=") for each in line.split(";"))
        if name == wanted
    ]
    return found[0] if len(found) == 1 else None


def _text(value: Mapping[str, Any], name: str) -> str:
    text = value.get(name)
    if not isinstance(text, str):
        raise SignInRefusedError(400, f"{name} is missing.", "malformed")
    return text


def _object(value: Mapping[str, Any]) -> Mapping[str, Any]:
    credential = value.get("credential")
    if not isinstance(credential, dict):
        raise SignInRefusedError(400, "credential is missing.", "malformed")
    return credential
