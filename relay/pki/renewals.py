"""What a node requests of the certificate authority over its session: another leaf, or to be retired.

A fault of the relay is answered as INTERNAL, never as the node's. Must not know frames; which relay has the
key of the CA is known to the ``LeafIssuer`` alone.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from attrs import define, field
from structlog.typing import FilteringBoundLogger

from relay.audit.log import AuditUnavailableError
from relay.audit.writer import AuditWriter
from relay.pki.authority import EndorsedRoots
from relay.pki.errors import AuthorityError, CertificateRefusedError, UnknownTargetError
from relay.state.certificates import IssuedLeaf
from schemas.error_roots import StateError
from schemas.errors import Failure, ToolError
from schemas.identity import Identity, first_certificate_in, kid_of
from schemas.payloads import Renewed
from schemas.text import printable
from schemas.times import SystemClock

_AT_ONCE = 4
_AGAIN_AFTER_MS = 3_600_000


HeldLeaf = Identity | IssuedLeaf
"""The leaf that a node has shown, here or to another relay."""


class LeafIssuer(Protocol):
    """Issues and revokes for nodes that have shown their leaf."""

    async def renew(self, held: HeldLeaf, csr_pem: str, *, server_roots: bool) -> Renewed:
        """Return what the node installs.

        Raises:
            CertificateRefusedError: the request is not for this node and its key.
            AuthorityError, StateError, OSError: the CA cannot.
            ToolError: INTERNAL or RATE_LIMITED, with a time to ask again: another relay's CA cannot now.
        """
        ...

    async def retire(self, held: HeldLeaf) -> Sequence[str]:
        """Revoke every leaf of the node; return their kids.

        Raises:
            CertificateRefusedError, UnknownTargetError: the CA never issued a leaf to the node.
            AuthorityError, StateError, OSError, ToolError: as ``renew``.
        """
        ...


class LeafAuthority(Protocol):
    """The part of the CA that nodes reach; see ``CertificateAuthority``."""

    def renew(self, csr_pem: str, node_id: str) -> str: ...
    def roots(self) -> list[str]: ...
    def endorsement(self) -> str | None: ...
    def server_roots(self) -> EndorsedRoots: ...
    def revoke(self, target: str, reason: str = "revoked") -> list[str]: ...


@define(eq=False, repr=False)
class OwnLeaves:
    """A ``LeafIssuer`` by this relay's CA, which waits for locks and for the disk, so it runs on a thread."""

    _ca: LeafAuthority

    async def renew(self, held: HeldLeaf, csr_pem: str, *, server_roots: bool) -> Renewed:
        return await asyncio.to_thread(self._renew, held.node_id, csr_pem, server_roots)

    def _renew(self, node_id: str, csr_pem: str, server_roots: bool) -> Renewed:  # noqa: FBT001 - on a thread
        leaf = self._ca.renew(csr_pem, node_id)
        issued = Renewed(certificate=leaf, roots="".join(self._ca.roots()))
        # After the roots: an endorsement by a rotation in between does not contradict them.
        if (endorsement := self._ca.endorsement()) is not None:
            issued["endorsement"] = endorsement
        if server_roots:
            known = self._ca.server_roots()
            issued["server_roots"], issued["server_endorsements"] = known.pem, known.endorsements
        return issued

    async def retire(self, held: HeldLeaf) -> Sequence[str]:
        return await asyncio.to_thread(self._ca.revoke, held.node_id, "retired")


@define(eq=False, repr=False)
class Renewals:
    """Renews and retires nodes that have proven their identity. What cannot be recorded is not answered."""

    _issuer: LeafIssuer
    _audit: AuditWriter
    _now_ms: SystemClock
    _log: FilteringBoundLogger
    _renewed_ms: dict[str, int] = field(init=False, factory=dict)
    _turns: asyncio.Semaphore = field(init=False, factory=lambda: asyncio.Semaphore(_AT_ONCE))

    async def renew(self, held: HeldLeaf, csr_pem: str, *, server_roots: bool = False) -> Renewed:
        """Return what the node installs, as members of ``renew_ack``; ``server_roots`` if it takes them.

        Raises:
            ToolError: ATTESTATION_FAILED: the request is not for this node and its key;
                INTERNAL: the CA cannot; RATE_LIMITED: the leaf is not half used up, or was just renewed.
        """
        self._check_due(held)
        async with self._turns:
            try:
                issued = await self._issuer.renew(held, csr_pem, server_roots=server_roots)
            except CertificateRefusedError as error:
                raise self._refusal("renewal refused", held, error) from None
            except (AuthorityError, StateError, OSError, ToolError) as error:
                # The node did not use up its turn.
                self._renewed_ms.pop(held.node_id, None)
                raise self._failure("renewal failed", held, error) from None
        self._record("renewed", held, kid_of(first_certificate_in(issued["certificate"])))
        return issued

    def _check_due(self, held: HeldLeaf) -> None:
        """Refuse what would only grow the ledger, where each leaf is an entry that stays."""
        now = self._now_ms()
        half = (held.not_before_ms + held.not_after_ms) // 2
        due = max(half, self._renewed_ms.get(held.node_id, -_AGAIN_AFTER_MS) + _AGAIN_AFTER_MS)
        if now < due:
            raise ToolError(Failure.RATE_LIMITED, "It is too early.", retry_after_ms=due - now)
        self._renewed_ms[held.node_id] = now

    async def retire(self, held: HeldLeaf) -> Sequence[str]:
        """Revoke every leaf of the node; return their kids.

        Raises:
            ToolError: ATTESTATION_FAILED: the CA never issued a leaf to the node; INTERNAL: the CA cannot.
        """
        async with self._turns:
            try:
                kids = await self._issuer.retire(held)
            except (CertificateRefusedError, UnknownTargetError) as error:
                raise self._refusal("retirement refused", held, error) from None
            except (AuthorityError, StateError, OSError, ToolError) as error:
                raise self._failure("retirement failed", held, error) from None
        for kid in kids:
            self._record("retired", held, kid)
        return kids

    def _record(self, event: str, held: HeldLeaf, kid: str) -> None:
        facts = {"node_id": held.node_id, "tenant": held.tenant, "kid": kid}
        try:
            self._audit.write(event=event, **facts)
        except AuditUnavailableError as error:
            raise ToolError(Failure.INTERNAL, "It could not be recorded.") from error
        self._log.info(event, **facts)

    def _failure(self, event: str, held: HeldLeaf, error: Exception) -> ToolError:
        self._log.error(event, node_id=held.node_id, reason=printable(str(error)))
        if isinstance(error, ToolError):
            return error
        return ToolError(Failure.INTERNAL, "The certificate authority cannot do that at present.")

    def _refusal(self, event: str, held: HeldLeaf, error: Exception) -> ToolError:
        # The text is for our log: what the ledger holds of a node is not shown to one that asks for it.
        self._log.warning(event, node_id=held.node_id, reason=printable(str(error)))
        return ToolError(Failure.ATTESTATION_FAILED, "The certificate authority does not do that.")
