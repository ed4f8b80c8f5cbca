"""Both ends of what relays without the CA's key ask of the relay that has it: enrol, renew, retire, certify.

``ForwardedEnrolments`` and ``ForwardedLeaves`` ask; ``AuthorityService`` answers. A node's request goes there
as it came, and its proof, with the join token's key, is checked there as if the node had asked that relay. A
relay gets certificates for the names of the fleet alone, whatever it asks. Must not know what carries the
requests.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import define, field
from structlog.typing import FilteringBoundLogger

from relay.audit.log import AuditUnavailableError
from relay.audit.refusal_counts import RefusalEvent
from relay.audit.writer import AuditWriter
from relay.pki.enrolments import EnrolmentRefusal, EnrolmentRefusedError, EnrolmentService, PkiEnvironment
from relay.pki.errors import AuthorityError, AuthorityStateError, CertificateRefusedError
from relay.pki.relay_tls import RelayUse, issue_for_another_relay, named_by
from relay.pki.renewals import HeldLeaf, Renewals
from relay.routing.authority_port import (
    AuthorityAction,
    AuthorityRefusedError,
    AuthorityUnavailableError,
    RemoteAuthority,
)
from relay.state.certificates import IssuedLeaf
from schemas.certificates import IdentityError, IdentityReason, is_relay_name, read_csr
from schemas.enrolment import EnrolRequest, EnrolResponse
from schemas.error_roots import StateError
from schemas.errors import Failure, ToolError
from schemas.identity import CertificateFormatError, first_certificate_in, kid_of
from schemas.payloads import Renewed
from schemas.text import printable

_REFUSED, _FAILED = Failure.ATTESTATION_FAILED.name.lower(), "internal"
_REASONS: Mapping[str, EnrolmentRefusal | IdentityReason] = {
    **{reason.value: reason for reason in EnrolmentRefusal},
    **{reason.value: reason for reason in IdentityReason},
    "rate_limited": EnrolmentRefusal.BUSY,
}


@define(eq=False, repr=False)
class ForwardedEnrolments:
    """Enrols by ``authority``, and records in ``audit`` what it has answered."""

    _authority: RemoteAuthority
    _audit: AuditWriter
    _log: FilteringBoundLogger

    async def enrol(self, message: EnrolRequest) -> EnrolResponse:
        try:
            # Here already: what proves no key must not take the time of the other relay.
            node_id, _ = await asyncio.to_thread(read_csr, message["csr"])
            answer = await self._authority.ask(AuthorityAction.ENROL, {"request": message})
        except IdentityError as error:
            raise EnrolmentRefusedError(error.reason) from None
        except AuthorityUnavailableError as error:
            self._log.warning("a node cannot be enrolled", reason=str(error))
            raise EnrolmentRefusedError(
                EnrolmentRefusal.CA_AWAY, retry_after_ms=error.retry_after_ms
            ) from None
        except AuthorityRefusedError as error:
            reason = _REASONS.get(error.reason, EnrolmentRefusal.FAILING)
            raise EnrolmentRefusedError(reason, retry_after_ms=error.retry_after_ms) from None
        response: EnrolResponse = answer["response"]
        self._record(node_id, message["join_id"], response["certificate"])
        return response

    def _record(self, node_id: str, join_id: str, certificate: str) -> None:
        try:
            kid = kid_of(first_certificate_in(certificate))
        except CertificateFormatError:
            self._log.error("the relay with the CA's key has answered without a certificate")
            raise EnrolmentRefusedError(EnrolmentRefusal.FAILING) from None
        facts = {"node_id": node_id, "join_id": join_id, "kid": kid}
        try:
            self._audit.write(event="enrolment_forwarded", **facts)
        except AuditUnavailableError as error:
            self._log.error("an enrolment is not recorded", reason=printable(str(error)))
            raise EnrolmentRefusedError(EnrolmentRefusal.AUDIT) from None
        self._log.info("enrolment forwarded", **facts)


@define(eq=False, repr=False)
class ForwardedLeaves:
    """A ``LeafIssuer`` by the relay that has the CA's key."""

    _authority: RemoteAuthority

    async def renew(self, held: HeldLeaf, csr_pem: str, *, server_roots: bool) -> Renewed:
        answer = await self._ask(AuthorityAction.RENEW, held, csr=csr_pem, server_roots=server_roots)
        issued = Renewed(certificate=answer["certificate"], roots=answer["roots"])
        if "endorsement" in answer:
            issued["endorsement"] = answer["endorsement"]
        if server_roots and "server_roots" in answer:
            issued["server_roots"] = answer["server_roots"]
            issued["server_endorsements"] = answer.get("server_endorsements", [])
        return issued

    async def retire(self, held: HeldLeaf) -> Sequence[str]:
        kids: list[str] = (await self._ask(AuthorityAction.RETIRE, held))["kids"]
        return kids

    async def _ask(self, action: AuthorityAction, held: HeldLeaf, **members: Any) -> Mapping[str, Any]:
        try:
            return await self._authority.ask(action, {"node_id": held.node_id, "kid": held.kid, **members})
        except (AuthorityUnavailableError, AuthorityRefusedError) as error:
            raise _as_ours(error) from None


def _as_ours(error: AuthorityUnavailableError | AuthorityRefusedError) -> Exception:
    """Return the error that this relay's own CA would have raised."""
    if isinstance(error, AuthorityUnavailableError):
        return ToolError(
            Failure.INTERNAL,
            "The certificate authority cannot be reached at present.",
            retry_after_ms=error.retry_after_ms,
        )
    if error.reason == Failure.RATE_LIMITED.name.lower():
        return ToolError(Failure.RATE_LIMITED, "It is too early.", retry_after_ms=error.retry_after_ms)
    if error.reason == Failure.ATTESTATION_FAILED.name.lower():
        return CertificateRefusedError("the relay with the CA's key refuses: its log has the reason")
    return AuthorityStateError(f"the relay with the CA's key cannot do it: {error.reason}")


@define(eq=False, repr=False)
class AuthorityService:
    """Answers by this relay's own parts: an ``AnsweringAuthority``. ``public_url`` is the fleet's."""

    _environment: PkiEnvironment
    _enrolments: EnrolmentService = field(kw_only=True)
    _renewals: Renewals = field(kw_only=True)
    _public_url: str = field(kw_only=True)
    _log: FilteringBoundLogger = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._log = self._environment.log

    async def answer(
        self, relay: str, action: AuthorityAction, members: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        try:
            match action:
                case AuthorityAction.ENROL:
                    return await self._enrol(relay, members)
                case AuthorityAction.RENEW:
                    return await self._renew(members)
                case AuthorityAction.RETIRE:
                    return await self._retire(members)
                case AuthorityAction.CERTIFY:
                    return await self._certify(relay, members)
        except ToolError as error:
            raise AuthorityRefusedError(error.failure.name.lower(), error.retry_after_ms) from None
        except (AuthorityError, StateError, OSError) as error:
            # Another relay learns no file's name.
            self._log.error("the CA cannot do what another relay asks", reason=printable(str(error)))
            raise AuthorityRefusedError(_FAILED) from None

    async def _enrol(self, relay: str, members: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            return {"response": await self._enrolments.enrol(members["request"])}
        except EnrolmentRefusedError as error:
            # The relay that the node has reached counts its address.
            self._environment.refusals.count(RefusalEvent.ENROLMENT_REFUSED, f"relay {relay}", error.reason)
            raise AuthorityRefusedError(error.reason, error.retry_after_ms) from None

    async def _renew(self, members: Mapping[str, Any]) -> Mapping[str, Any]:
        held = await asyncio.to_thread(self._held, members["node_id"], members["kid"])
        issued = await self._renewals.renew(held, members["csr"], server_roots=members["server_roots"])
        return {"ok": True, **issued}

    async def _retire(self, members: Mapping[str, Any]) -> Mapping[str, Any]:
        held = await asyncio.to_thread(self._held, members["node_id"], members["kid"])
        return {"kids": list(await self._renewals.retire(held))}

    def _held(self, node_id: str, kid: str) -> HeldLeaf:
        """Return the leaf that a node has shown to another relay, as this relay's ledger has it.

        Raises:
            AuthorityRefusedError: it was not issued to that node, is revoked, or has ended.
        """
        records = self._environment.ca.records()
        leaf = records.issued.get(kid)
        if not isinstance(leaf, IssuedLeaf) or leaf.node_id != node_id or kid in records.revoked:
            raise AuthorityRefusedError(_REFUSED)
        if self._environment.now_ms() >= leaf.not_after_ms:
            raise AuthorityRefusedError(_REFUSED)
        return leaf

    async def _certify(self, relay: str, members: Mapping[str, Any]) -> Mapping[str, Any]:
        use, public_key = members["use"], members["public_key"]
        name = relay if is_relay_name(relay) else None
        if use == RelayUse.CLUSTER and named_by(public_key) != name:
            # Renewed is the one that has asked, over a sealed channel; no relay gets its first one so.
            raise AuthorityRefusedError(_REFUSED)
        certificate = await asyncio.to_thread(
            issue_for_another_relay, self._environment.ca, use, public_key, self._public_url, name
        )
        kid = kid_of(first_certificate_in(certificate))
        try:
            self._environment.audit.write(event="relay_certified", relay=relay, use=use, kid=kid)
        except AuditUnavailableError:
            raise AuthorityRefusedError(_FAILED) from None
        return {"certificate": certificate}
