"""Sign-in at a relay without the CA's key: another relay answers, over the sealed channel between the two.

So codes, sessions and passkeys are at one relay, and a load balancer may send each request to any. Here a
request is metered by its address, its body is read within the usual bounds, and it goes as it came; there it
is answered as if it had come there. Must not read what is in it, and must not send it in a fleet that is not
sealed.
"""

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from attrs import define, field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message

from relay.audit.refusal_counts import RefusalCounter, RefusalEvent
from relay.observability.metrics import Metrics
from relay.routing.port import Asker, NoResponderError, PeerHandler, Peers
from relay.sign_in.incoming import MAX_BODY, AddressMeter, SignInRefusedError, address_of, read_body
from relay.sign_in.metadata import AUTHORIZE, REGISTER, REVOKE, TOKEN
from relay.sign_in.pages import (
    COMMON,
    ELSEWHERE,
    FROM_ELSEWHERE,
    SIGN_IN,
    SIGN_OUT,
    SignInPages,
)
from relay.sign_in.redeeming import away
from relay.state.people import INVITATION_PATH
from schemas.errors import Failure, ToolError
from schemas.keys import base64url, from_base64url

KIND = "sign_in"
PAGES = {
    AUTHORIZE: ("GET", "POST"),
    SIGN_IN: ("GET",),
    f"{SIGN_IN}/end": ("POST",),
    SIGN_OUT: ("POST",),
    INVITATION_PATH: ("GET",),
    ELSEWHERE: ("GET",),
    FROM_ELSEWHERE: ("GET",),
}
PROGRAMS = tuple(f"{page}/{what}" for page in (SIGN_IN, INVITATION_PATH) for what in ("options", "passkey"))
CLIENTS = (TOKEN, REGISTER, REVOKE)
FORWARDED = PAGES | dict.fromkeys((*PROGRAMS, *CLIENTS), ("POST",))
"""The paths that the other relay answers, and their methods."""
_SIGNED_IN = {
    f"{SIGN_IN}/passkey": HTTPStatus.OK,
    f"{INVITATION_PATH}/passkey": HTTPStatus.OK,
    FROM_ELSEWHERE: HTTPStatus.SEE_OTHER,
}
"""The answers with which a person has signed in."""
TIMEOUT_S = 10.0
MAX_AT_ONCE = 64
_HEADERS = frozenset({"accept", "content-type", "cookie", "origin", "sec-fetch-site"})
"""What the other relay reads of a request."""
_MAX_TEXT, _MAX_TEXTS, _MAX_HEADERS = 8 * 1024, 24 * 1024, 32
"""Of the query or a header, of all of them together, and of headers: the document has the first and last."""
_AWAY = "The relay that signs people in is not reached: try again later."


@define(eq=False, repr=False, kw_only=True)
class ForwardedSignIn:
    """Forwards sign-in to that of ``peers`` which answers it; ``metadata`` is the authorization server's."""

    _metadata: Mapping[str, Any]
    _peers: Peers
    _pages: SignInPages
    _meter: AddressMeter
    _metrics: Metrics
    _refusals: RefusalCounter
    _holder: str = field(init=False, default="")
    _waiting: int = field(init=False, default=0)

    def application(self, more: Sequence[Route]) -> tuple[Starlette, frozenset[str]]:
        """Return what serves, and the paths that it serves: with ``more``, which are of others."""
        routes = [
            *(Route(path, self._forward, methods=methods) for path, methods in FORWARDED.items()),
            *more,
        ]
        return self._pages.application(self._metadata, routes)

    async def _forward(self, request: Request) -> Response:
        try:
            address = self._meter.admit(request)
            answer = await self._answer(await _written(request, address), address)
        except SignInRefusedError as error:
            self._metrics.sign_ins.labels("refused").inc()
            self._refusals.count(RefusalEvent.SIGN_IN_REFUSED, address_of(request), error.reason)
            return self._refusal(request.scope["path"], error)
        self._metrics.sign_ins.labels("forwarded").inc()
        return answer

    async def _answer(self, body: Mapping[str, Any], address: str) -> Response:
        """Return what the relay with the CA's key answers: one after the other is asked, until it has.

        Raises:
            SignInRefusedError: none has. A request that may have been read is not repeated.
        """
        if self._waiting >= MAX_AT_ONCE:
            raise SignInRefusedError.too_many()
        self._waiting += 1
        try:
            for relay in sorted(self._peers.running(), key=lambda each: each != self._holder):
                try:
                    answer = _read(await self._peers.ask(relay, KIND, body, TIMEOUT_S))
                except NoResponderError:
                    continue
                except ToolError as error:
                    if error.failure is Failure.INTERNAL:
                        continue  # it does not sign people in
                    raise away(_AWAY) from None
                except (TimeoutError, KeyError, ValueError, TypeError):
                    raise away(_AWAY) from None
                self._holder = relay
                if answer.status_code == _SIGNED_IN.get(body["path"]):
                    self._meter.signed_in(address, "")
                return answer
        finally:
            self._waiting -= 1
        raise away(_AWAY)

    def _refusal(self, path: str, error: SignInRefusedError) -> Response:
        """Return the answer of this relay, in the form of that path."""
        headers = dict(COMMON)
        if error.retry_after_ms is not None:
            headers["retry-after"] = str(-(-error.retry_after_ms // 1000))
        if path in PAGES:
            advice = "Close this page, and begin again in your client."
            answer = self._pages.page("error", error.status, text=error.text, advice=advice)
            answer.headers.update(headers)
            return answer
        if path in PROGRAMS:
            return JSONResponse({"error": error.reason, "message": error.text}, error.status, headers)
        later = error.status in {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}
        code = "temporarily_unavailable" if later else "invalid_request"
        return JSONResponse({"error": code, "error_description": error.text}, error.status, headers)


async def _written(request: Request, address: str) -> Mapping[str, Any]:
    """Return ``request`` as it is sent.

    Raises:
        SignInRefusedError: it cannot be: it is too large, malformed, or does not end.
    """
    query = request.scope["query_string"].decode("latin-1")
    headers = [[name, value] for name, value in request.headers.items() if name in _HEADERS]
    texts = (query, *(value for _, value in headers))
    if max(map(len, texts)) > _MAX_TEXT or sum(map(len, texts)) > _MAX_TEXTS or len(headers) > _MAX_HEADERS:
        raise SignInRefusedError(414, "The address or a header is too long.", "too_large")
    if not all(text.isascii() and text.isprintable() for text in texts):
        raise SignInRefusedError(400, "The request is malformed.", "malformed")
    return {
        # The server leaves out the body that was not asked for.
        "method": "GET" if request.method == "HEAD" else request.method,
        "path": request.scope["path"],
        "query": query,
        "headers": headers,
        "address": address,
        "body": base64url(await read_body(request, MAX_BODY)) if request.method == "POST" else "",
    }


def _read(answer: Mapping[str, Any]) -> Response:
    """Return the answer of a relay that is proven, and may be of another version.

    Raises:
        KeyError, ValueError, TypeError: it is none.
    """
    response = Response(from_base64url(answer["body"]), int(answer["status"]))
    response.raw_headers = [
        (name.encode("latin-1"), value.encode("latin-1")) for name, value in answer["headers"]
    ]
    return response


# --- at the relay that answers ---------------------------------------------------------------------------


def answering(application: ASGIApp) -> PeerHandler:
    """Return what answers the requests of other relays by ``application``: those that were sealed."""

    async def answer(asker: Asker, body: Mapping[str, Any]) -> Mapping[str, Any]:
        if asker.token is None:
            raise ToolError(Failure.INTERNAL)  # nothing proves whose request it is
        data, sent = from_base64url(body["body"]), list[Message]()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "https",
            "method": body["method"],
            "path": body["path"],
            "raw_path": body["path"].encode("ascii"),
            "root_path": "",
            "query_string": body["query"].encode("ascii"),
            "headers": [(name.encode("ascii"), value.encode("ascii")) for name, value in body["headers"]],
            "client": (body["address"], 0),
            "server": None,
            "state": {},
        }

        async def receive() -> Message:
            return {"type": "http.request", "body": data, "more_body": False}

        async def send(message: Message) -> None:
            sent.append(message)

        await application(scope, receive, send)
        start, *pieces = sent
        headers = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in start["headers"]]
        whole = b"".join(piece.get("body", b"") for piece in pieces)
        return {"status": start["status"], "headers": headers, "body": base64url(whole)}

    return answer
