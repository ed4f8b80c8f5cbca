"""What the relay with the CA's key does for the relays that do not have it.

A node's proof is checked here as if the node had asked this relay. A relay gets certificates for the names of
the fleet alone, whatever it asks. Must not know what carries the requests.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from relay.audit.log import AuditUnavailableError
from relay.audit.refusal_counts import RefusalEvent
from relay.pki.enrolments import EnrolmentRefusedError, EnrolmentService
from relay.pki.environment import PkiEnvironment
from relay.pki.errors import AuthorityError
from relay.pki.own_certificate import issue_for_another_relay
from relay.pki.renewals import Renewals
from relay.routing.authority_port import AuthorityAction, AuthorityRefusedError
from relay.state.certificates import IssuedLeaf
from schemas.error_roots import StateError
from schemas.errors import Failure, ToolError
from schemas.identity import first_certificate_in, kid_of
from schemas.text import printable

_REFUSED, _FAILED = Failure.ATTESTATION_FAILED.name.lower(), "internal"


@dataclass(frozen=True, slots=True)
class _Held:
    """A leaf as the ledger has it: a ``HeldLeaf``."""

    node_id: str
    tenant: str
    kid: str
    not_before_ms: int
    not_after_ms: int


class AuthorityService:
    """Answers by this relay's own parts: an ``AnsweringAuthority``. ``public_url`` is the fleet's."""

    def __init__(
        self,
        environment: PkiEnvironment,
        *,
        enrolments: EnrolmentService,
        renewals: Renewals,
        public_url: str,
    ) -> None:
        self._environment = environment
        self._ca, self._log = environment.ca, environment.log
        self._enrolments = enrolments
        self._renewals = renewals
        self._public_url = public_url
        self._acts: Mapping[
            AuthorityAction, Callable[[str, Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
        ] = {
            AuthorityAction.ENROL: self._enrol,
            AuthorityAction.RENEW: self._renew,
            AuthorityAction.RETIRE: self._retire,
            AuthorityAction.CERTIFY: self._certify,
        }

    async def answer(
        self, relay: str, action: AuthorityAction, members: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Answer, as ``AnsweringAuthority`` describes."""
        try:
            return await self._acts[action](relay, members)
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

    async def _renew(self, _relay: str, members: Mapping[str, Any]) -> Mapping[str, Any]:
        held = await asyncio.to_thread(self._held, members["node_id"], members["kid"])
        issued = await self._renewals.renew(held, members["csr"], server_roots=members["server_roots"])
        return {"ok": True, **issued}

    async def _retire(self, _relay: str, members: Mapping[str, Any]) -> Mapping[str, Any]:
        held = await asyncio.to_thread(self._held, members["node_id"], members["kid"])
        return {"kids": list(await self._renewals.retire(held))}

    def _held(self, node_id: str, kid: str) -> _Held:
        """Return the leaf that a node has shown to another relay, as this relay's ledger has it.

        Raises:
            AuthorityRefusedError: it was not issued to that node, is revoked, or has ended.
        """
        records = self._ca.records()
        leaf = records.issued.get(kid)
        if not isinstance(leaf, IssuedLeaf) or leaf.node_id != node_id or kid in records.revoked:
            raise AuthorityRefusedError(_REFUSED)
        if self._environment.now_ms() >= leaf.not_after_ms:
            raise AuthorityRefusedError(_REFUSED)
        return _Held(node_id, leaf.tenant, kid, leaf.issued_ms, leaf.not_after_ms)

    async def _certify(self, relay: str, members: Mapping[str, Any]) -> Mapping[str, Any]:
        certificate = await asyncio.to_thread(
            issue_for_another_relay, self._ca, members["use"], members["public_key"], self._public_url
        )
        kid = kid_of(first_certificate_in(certificate))
        try:
            self._environment.audit.write(event="relay_certified", relay=relay, use=members["use"], kid=kid)
        except AuditUnavailableError:
            raise AuthorityRefusedError(_FAILED) from None
        return {"certificate": certificate}
