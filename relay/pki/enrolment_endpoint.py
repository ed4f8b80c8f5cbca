"""The endpoint at which nodes enrol: ``/enroll``.

The roots are public. Every request that is not accepted gets the same answer, and the audit gets the reason.
Must not decide who is enrolled: ``enrolments`` does, here or on the relay that has the CA's key.
"""

import asyncio
from collections.abc import Mapping

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from relay.audit.refusal_counts import RefusalEvent
from relay.pki.enrolments import EnrolmentRefusal, EnrolmentRefusedError, EnrolmentService, PkiEnvironment
from schemas.enrolment import ENROL_PATH, MAX_REQUEST_BYTES, REQUEST_REF, EnrolRequest, shown_roots
from schemas.error_roots import StateError
from schemas.registry import SchemaRegistry
from schemas.strict_json import StrictJsonError, loads
from schemas.text import printable

_BODY_TIMEOUT_S = 10.0

_TEXTS = {
    400: "Send an enrol.request@1.0.0 as application/json.",
    403: "This node is not enrolled.",
    408: "The request did not end.",
    413: "The request is too large.",
    429: "Too many nodes enrol at once: try again.",
    500: "This relay cannot enrol at present.",
    503: "This relay has no CA key.",
}
_TEXTS_OF: Mapping[str, str] = {
    EnrolmentRefusal.CA_AWAY: "The relay with the CA's key does not answer: try again later.",
    EnrolmentRefusal.NOT_COUNTED: "The servers that the relays share do not answer: try again later.",
}
"""Of reasons whose status has another text."""


class EnrolmentEndpoint:
    """Serves ``/enroll``: the roots of the CA, and what ``enrolments`` answers."""

    def __init__(
        self,
        environment: PkiEnvironment,
        enrolments: EnrolmentService,
        registry: SchemaRegistry,
        *,
        body_timeout_s: float = _BODY_TIMEOUT_S,
    ) -> None:
        self._environment = environment
        self._ca, self._log = environment.ca, environment.log
        self._enrolments = enrolments
        self._form = registry.load(REQUEST_REF)
        self._body_timeout_s = body_timeout_s
        self._shown: tuple[tuple[str, ...], str] | None = None

    def routes(self) -> list[Route]:
        return [
            Route(ENROL_PATH, self._show_roots, methods=["GET"]),
            Route(ENROL_PATH, self._enrol, methods=["POST"]),
        ]

    async def _show_roots(self, _request: Request) -> Response:
        try:
            return PlainTextResponse(await asyncio.to_thread(self._shown_roots))
        except (StateError, OSError) as error:
            self._log.error("the roots cannot be read", reason=printable(str(error)))
            return _answer(503, _TEXTS[503])

    def _shown_roots(self) -> str:
        # Kept while the roots stay: unauthenticated requests must not make the CA sign each time.
        trusted = (*self._ca.roots(), *self._ca.servers.roots())
        if self._shown is None or self._shown[0] != trusted:
            text = shown_roots("".join(self._ca.roots()), *self._ca.server_roots())
            self._shown = (trusted, text)
        return self._shown[1]

    async def _enrol(self, request: Request) -> Response:
        try:
            message = self._read(request, await self._body(request))
            return JSONResponse(await self._enrolments.enrol(message), headers=_UNKEPT)
        except EnrolmentRefusedError as refusal:
            source = request.client.host if request.client else "unknown"
            self._environment.refusals.count(RefusalEvent.ENROLMENT_REFUSED, source, refusal.reason)
            text = _TEXTS_OF.get(refusal.reason) or _TEXTS[refusal.status]
            return _answer(refusal.status, text, refusal.retry_after_ms)

    async def _body(self, request: Request) -> bytes:
        body = bytearray()
        try:
            async with asyncio.timeout(self._body_timeout_s):
                async for piece in request.stream():
                    body += piece
                    if len(body) > MAX_REQUEST_BYTES:
                        raise EnrolmentRefusedError(EnrolmentRefusal.TOO_LARGE)
        except TimeoutError:
            raise EnrolmentRefusedError(EnrolmentRefusal.SLOW) from None
        except ClientDisconnect:
            raise EnrolmentRefusedError(EnrolmentRefusal.GONE) from None
        return bytes(body)

    def _read(self, request: Request, body: bytes) -> EnrolRequest:
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        try:
            read = loads(body, max_bytes=MAX_REQUEST_BYTES)
        except StrictJsonError:
            raise EnrolmentRefusedError(EnrolmentRefusal.MALFORMED) from None
        if media_type != "application/json" or not self._form.is_valid(read):
            raise EnrolmentRefusedError(EnrolmentRefusal.MALFORMED)
        message: EnrolRequest = read
        return message


_UNKEPT = {"cache-control": "no-store"}


def _answer(status: int, text: str, retry_after_ms: int | None = None) -> Response:
    # The rest of a request that was not read to its end must not be parsed as the next one.
    headers = {**_UNKEPT, "connection": "close"}
    if retry_after_ms is not None:
        headers["retry-after"] = str(-(-retry_after_ms // 1000))
    return JSONResponse({"error": "enrolment", "message": text}, status, headers)
