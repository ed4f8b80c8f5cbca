"""The endpoint at which nodes enrol: ``/enroll``.

The roots are public. A leaf is issued to a node that proves to hold a join token's key and the leaf's key;
every other request gets the same answer, and the audit gets the reason. Must not decide what the CA decides:
which id belongs to which key.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from structlog.typing import FilteringBoundLogger

from relay.audit.log import AuditLog, AuditUnavailableError
from relay.audit.refusal_counts import RefusalCounter, RefusalEvent
from relay.pki.authority import CertificateAuthority
from relay.pki.errors import AuthorityError, IdTakenError
from relay.pki.join_tokens import JoinGrant, JoinRefusedError, JoinTokens
from schemas.addresses import BrokerAddress
from schemas.certificates import IdentityError, IdentityReason, read_csr
from schemas.enrolment import (
    ENROL_PATH,
    MAX_REQUEST_BYTES,
    NODE,
    RELAY,
    REQUEST_REF,
    is_proven,
    proven,
    shown_roots,
)
from schemas.error_roots import PeerError, StateError
from schemas.identity import certificates_in, kid_of
from schemas.registry import SchemaRegistry
from schemas.strict_json import StrictJsonError, loads
from schemas.text import printable

_BODY_TIMEOUT_S = 10.0
_AT_ONCE = 4
_MAX_ANSWERS = 5  # of which all but one may be lost
_MAX_WAITING = 1000

_TEXTS = {
    400: "Send an enrol.request@1.0.0 as application/json.",
    403: "This node is not enrolled.",
    408: "The request did not end.",
    413: "The request is too large.",
    429: "Too many nodes enrol at once: try again.",
    500: "This relay cannot enrol at present.",
    503: "This relay has no CA key.",
}


class EnrolmentRefusal(StrEnum):
    """Why an enrolment is refused, for the audit."""

    TOO_LARGE = "too_large"
    SLOW = "slow"
    GONE = "gone"
    MALFORMED = "malformed"
    BUSY = "busy"
    FAILING = "failing"
    UNKNOWN_TOKEN = "unknown_token"  # noqa: S105 - a reason, and no password
    PROOF = "proof"
    NO_CA = "no_ca"
    USED_UP = "used_up"
    ID_TAKEN = "id_taken"
    AUDIT = "audit"


class _RefusedError(PeerError):
    """The request is refused. ``reason`` is for the audit; the client sees the status alone."""

    def __init__(self, reason: EnrolmentRefusal | IdentityReason, status: int = 403) -> None:
        super().__init__(reason)
        self.reason = reason
        self.status = status


@dataclass(frozen=True, slots=True)
class _Issued:
    node_id: str
    tenant: str
    certificate: str
    roots: str
    server_roots: str
    key: bytes = field(repr=False)
    label_given: bool


@dataclass(frozen=True, slots=True)
class EnrolmentInfo:
    """What a node learns of this relay when it enrols.

    Attributes:
        public_url: in its normal form; the node pins it.
        broker: the MQTT broker as nodes reach it; None: they announce themselves by their sessions alone.
        own_root: whether relay and broker show certificates of this relay's own CA.
    """

    public_url: str
    broker: BrokerAddress | None
    own_root: bool


NameNode = Callable[[str, str, str, Sequence[str]], bool]
"""Names a node that enrols: node id, tenant, label, tags. Returns False if the label is not given."""


class EnrolmentEndpoint:
    """Serves ``/enroll``."""

    def __init__(  # noqa: PLR0913 - what comes in from outside
        self,
        *,
        ca: CertificateAuthority,
        join_tokens: JoinTokens,
        name_node: NameNode,
        registry: SchemaRegistry,
        info: EnrolmentInfo,
        refusals: RefusalCounter,
        audit: AuditLog,
        log: FilteringBoundLogger,
        now_ms: Callable[[], int],
        body_timeout_s: float = _BODY_TIMEOUT_S,
    ) -> None:
        self._ca = ca
        self._join_tokens = join_tokens
        self._name_node = name_node
        self._form = registry.load(REQUEST_REF)
        self._info = info
        self._refusals = refusals
        self._audit = audit
        self._log = log
        self._now_ms = now_ms
        self._body_timeout_s = body_timeout_s
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._waiting = 0
        self._shown: tuple[tuple[str, ...], str] | None = None

    def routes(self) -> list[Route]:
        """Return the routes to mount."""
        return [
            Route(ENROL_PATH, self._show_roots, methods=["GET"]),
            Route(ENROL_PATH, self._enrol, methods=["POST"]),
        ]

    async def _show_roots(self, _request: Request) -> Response:
        try:
            return PlainTextResponse(await asyncio.to_thread(self._shown_roots))
        except (StateError, OSError) as error:
            self._log.error("the roots cannot be read", reason=printable(str(error)))
            return _answer(503)

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
            return JSONResponse(self._answered(message, await self._in_turn(message)), headers=_UNKEPT)
        except _RefusedError as refusal:
            source = request.client.host if request.client else "unknown"
            self._refusals.count(RefusalEvent.ENROLMENT_REFUSED, source, refusal.reason)
            return _answer(refusal.status)

    async def _body(self, request: Request) -> bytes:
        body = bytearray()
        try:
            async with asyncio.timeout(self._body_timeout_s):
                async for piece in request.stream():
                    body += piece
                    if len(body) > MAX_REQUEST_BYTES:
                        raise _RefusedError(EnrolmentRefusal.TOO_LARGE, 413)
        except TimeoutError:
            raise _RefusedError(EnrolmentRefusal.SLOW, 408) from None
        except ClientDisconnect:
            raise _RefusedError(EnrolmentRefusal.GONE, 400) from None
        return bytes(body)

    def _read(self, request: Request, body: bytes) -> dict[str, Any]:
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        try:
            message = loads(body, max_bytes=MAX_REQUEST_BYTES)
        except StrictJsonError:
            message = None
        if media_type != "application/json" or not isinstance(message, dict):
            raise _RefusedError(EnrolmentRefusal.MALFORMED, 400)
        if not self._form.is_valid(message):
            raise _RefusedError(EnrolmentRefusal.MALFORMED, 400)
        return message

    async def _in_turn(self, message: dict[str, Any]) -> _Issued:
        """Decide on a thread: it waits for the disk and for locks that a command may hold."""
        if self._waiting >= _MAX_WAITING:
            raise _RefusedError(EnrolmentRefusal.BUSY, 429)
        self._waiting += 1
        try:
            async with self._slots:
                return await asyncio.to_thread(self._decide, message)
        except (AuthorityError, StateError, OSError) as error:
            if self._refusals.count(RefusalEvent.ENROLMENT_FAILING, "relay", EnrolmentRefusal.FAILING):
                self._log.error("a node cannot be enrolled", reason=printable(str(error)))
            raise _RefusedError(EnrolmentRefusal.FAILING, 500) from None
        finally:
            self._waiting -= 1

    def _decide(self, message: dict[str, Any]) -> _Issued:
        join_id = message["join_id"]
        grant = self._join_tokens.find(join_id)
        if grant is None:
            raise _RefusedError(EnrolmentRefusal.UNKNOWN_TOKEN)
        if not is_proven(message, grant.key, NODE):
            raise _RefusedError(EnrolmentRefusal.PROOF)
        if not self._ca.can_issue():
            raise _RefusedError(EnrolmentRefusal.NO_CA, 503)
        try:
            node_id, public_key = read_csr(message["csr"])
        except IdentityError as error:
            raise _RefusedError(error.reason) from None
        self._check_free(node_id, public_key, join_id)
        # Spent before the leaf is issued: after a crash in between, the same node alone can enrol again.
        try:
            self._join_tokens.spend(join_id, node_id)
            leaf = self._ca.enrol(message["csr"], grant.tenant, join_id)
            label_given = self._give_names(node_id, grant)
        except JoinRefusedError:
            raise _RefusedError(EnrolmentRefusal.USED_UP) from None
        except IdTakenError:
            raise _RefusedError(EnrolmentRefusal.ID_TAKEN) from None
        roots, server_roots = "".join(self._ca.roots()), "".join(self._ca.servers.roots())
        return _Issued(node_id, grant.tenant, leaf, roots, server_roots, grant.key, label_given)

    def _give_names(self, node_id: str, grant: JoinGrant) -> bool:
        """Give the node what the token carries; return False if that is another node's label by now."""
        if not (grant.label or grant.tags):
            return True
        return self._name_node(node_id, grant.tenant, grant.label, grant.tags)

    def _check_free(self, node_id: str, public_key: bytes, join_id: str) -> None:
        """Refuse what the CA would refuse, before the token is spent on it."""
        records = self._ca.records()
        if records.existed(node_id):
            held = {(leaf.public_key, leaf.join_id) for leaf in records.unrevoked(node_id)}
            if (public_key, join_id) not in held:
                raise _RefusedError(EnrolmentRefusal.ID_TAKEN)
            # Each is an entry that stays, and a recorded request can be replayed.
            if sum(leaf.join_id == join_id for leaf in records.unrevoked(node_id)) >= _MAX_ANSWERS:
                raise _RefusedError(EnrolmentRefusal.USED_UP)

    def _answered(self, message: dict[str, Any], issued: _Issued) -> dict[str, Any]:
        """Return the answer once it is in the audit: what is not recorded is not issued."""
        kid = kid_of(certificates_in(issued.certificate)[0])
        facts = {"node_id": issued.node_id, "tenant": issued.tenant, "join_id": message["join_id"]}
        try:
            self._audit.write(event="enrolled", kid=kid, **facts)
        except AuditUnavailableError as error:
            self._log.error("an enrolment is not recorded", reason=printable(str(error)))
            raise _RefusedError(EnrolmentRefusal.AUDIT, 500) from None
        self._log.info("node enrolled", kid=kid, **facts)
        if not issued.label_given:
            self._log.warning("node enrolled without the label of its join token", **facts)
        answer = {
            "certificate": issued.certificate,
            "roots": issued.roots,
            **({"server_roots": issued.server_roots} if "server_roots" in message else {}),
            "relay_url": self._info.public_url,
            "broker": None if self._info.broker is None else str(self._info.broker),
            "own_root": self._info.own_root,
            "nonce": message["nonce"],
            "server_time_ms": self._now_ms(),
        }
        return proven(answer, issued.key, RELAY)


_UNKEPT = {"cache-control": "no-store"}


def _answer(status: int) -> Response:
    # The rest of a request that was not read to its end must not be parsed as the next one.
    headers = {**_UNKEPT, "connection": "close"}
    return JSONResponse({"error": "enrolment", "message": _TEXTS[status]}, status, headers)
