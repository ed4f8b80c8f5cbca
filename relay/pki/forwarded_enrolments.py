"""Enrols at the relay that has the CA's key, for a relay that does not.

The node's request goes there as it came, and the answer comes back as it was made: both are proven with the
join token's key, which is on that relay and on the node alone. Must not decide who is enrolled.
"""

import asyncio
from collections.abc import Mapping

from structlog.typing import FilteringBoundLogger

from relay.audit.log import AuditLog, AuditUnavailableError
from relay.pki.enrolments import EnrolmentRefusal, EnrolmentRefusedError
from relay.routing.authority_port import (
    AuthorityAction,
    AuthorityRefusedError,
    AuthorityUnavailableError,
    RemoteAuthority,
)
from schemas.certificates import IdentityError, IdentityReason, read_csr
from schemas.enrolment import EnrolRequest, EnrolResponse
from schemas.identity import CertificateFormatError, first_certificate_in, kid_of
from schemas.text import printable

_REASONS: Mapping[str, EnrolmentRefusal | IdentityReason] = {
    **{reason.value: reason for reason in EnrolmentRefusal},
    **{reason.value: reason for reason in IdentityReason},
    "rate_limited": EnrolmentRefusal.BUSY,
}


class ForwardedEnrolments:
    """Enrols by ``authority``, and records in ``audit`` what it has answered."""

    def __init__(self, authority: RemoteAuthority, audit: AuditLog, log: FilteringBoundLogger) -> None:
        self._authority = authority
        self._audit = audit
        self._log = log

    async def enrol(self, message: EnrolRequest) -> EnrolResponse:
        """Enrol, as ``Enrols`` describes."""
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
