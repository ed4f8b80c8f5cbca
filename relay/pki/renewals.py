"""What a node requests of the certificate authority over its session: another leaf, or to be retired.

The CA waits for locks and for the disk, so it runs on a thread. A fault of the relay is answered as INTERNAL,
never as the node's. Must not know frames.
"""

import asyncio
from collections.abc import Callable
from typing import NotRequired, Protocol, TypedDict

from structlog.typing import FilteringBoundLogger

from relay.audit.log import AuditLog, AuditUnavailableError
from relay.pki.errors import AuthorityError, CertificateRefusedError, UnknownTargetError
from relay.pki.server_authority import EndorsedRoots
from schemas.error_roots import StateError
from schemas.errors import Failure, ToolError
from schemas.identity import Identity, certificates_in, kid_of
from schemas.text import printable

_AT_ONCE = 4
_AGAIN_AFTER_MS = 3_600_000


class LeafAuthority(Protocol):
    """The part of the CA that nodes reach."""

    def renew(self, csr_pem: str, node_id: str) -> str:
        """Return a new leaf for the node and the key that the ledger binds to it."""
        ...

    def roots(self) -> list[str]:
        """Return the roots of nodes that are trusted now."""
        ...

    def endorsement(self) -> str | None:
        """Return by what the root before the current one vouches for it."""
        ...

    def server_roots(self) -> EndorsedRoots:
        """Return the roots of servers that are trusted now, and by what those of nodes vouch for them."""
        ...

    def revoke(self, target: str, reason: str = "revoked") -> list[str]:
        """Revoke the leaves of a node; return their kids."""
        ...


class Renewed(TypedDict):
    """What a node installs: members of ``renew_ack``."""

    certificate: str
    roots: str
    endorsement: NotRequired[str]
    server_roots: NotRequired[str]
    server_endorsements: NotRequired[list[str]]


class Renewals:
    """Renews and retires nodes that have proven their identity. What cannot be recorded is not answered."""

    def __init__(
        self, ca: LeafAuthority, audit: AuditLog, now_ms: Callable[[], int], log: FilteringBoundLogger
    ) -> None:
        self._ca = ca
        self._audit = audit
        self._now_ms = now_ms
        self._log = log
        self._renewed_ms: dict[str, int] = {}
        self._turns = asyncio.Semaphore(_AT_ONCE)

    async def renew(self, identity: Identity, csr_pem: str, *, server_roots: bool = False) -> Renewed:
        """Return what the node installs, as members of ``renew_ack``; ``server_roots`` if it takes them.

        Raises:
            ToolError: ATTESTATION_FAILED: the request is not for this node and its key;
                INTERNAL: the CA cannot; RATE_LIMITED: the leaf is not half used up, or was just renewed.
        """
        self._check_due(identity)
        async with self._turns:
            try:
                issued = await asyncio.to_thread(self._issue, identity.node_id, csr_pem, server_roots)
            except CertificateRefusedError as error:
                raise self._refused("renewal refused", identity, error) from None
            except (AuthorityError, StateError, OSError) as error:
                # The node did not use up its turn.
                self._renewed_ms.pop(identity.node_id, None)
                raise self._failed("renewal failed", identity, error) from None
        self._record("renewed", identity, kid_of(certificates_in(issued["certificate"])[0]))
        return issued

    def _issue(self, node_id: str, csr_pem: str, server_roots: bool) -> Renewed:  # noqa: FBT001 - on a thread
        leaf = self._ca.renew(csr_pem, node_id)
        issued = Renewed(certificate=leaf, roots="".join(self._ca.roots()))
        # After the roots: an endorsement by a rotation in between does not contradict them.
        if (endorsement := self._ca.endorsement()) is not None:
            issued["endorsement"] = endorsement
        if server_roots:
            known = self._ca.server_roots()
            issued["server_roots"], issued["server_endorsements"] = known.pem, known.endorsements
        return issued

    def _check_due(self, identity: Identity) -> None:
        """Refuse what would only grow the ledger, where each leaf is an entry that stays."""
        now = self._now_ms()
        half = (identity.not_before_ms + identity.not_after_ms) // 2
        due = max(half, self._renewed_ms.get(identity.node_id, -_AGAIN_AFTER_MS) + _AGAIN_AFTER_MS)
        if now < due:
            raise ToolError(Failure.RATE_LIMITED, "It is too early.", retry_after_ms=due - now)
        self._renewed_ms[identity.node_id] = now

    async def retire(self, identity: Identity) -> None:
        """Revoke every leaf of the node.

        Raises:
            ToolError: ATTESTATION_FAILED: the CA never issued a leaf to the node; INTERNAL: the CA cannot.
        """
        async with self._turns:
            try:
                kids = await asyncio.to_thread(self._ca.revoke, identity.node_id, "retired")
            except UnknownTargetError as error:
                raise self._refused("retirement refused", identity, error) from None
            except (AuthorityError, StateError, OSError) as error:
                raise self._failed("retirement failed", identity, error) from None
        for kid in kids:
            self._record("retired", identity, kid)

    def _record(self, event: str, identity: Identity, kid: str) -> None:
        facts = {"node_id": identity.node_id, "tenant": identity.tenant, "kid": kid}
        try:
            self._audit.write(event=event, **facts)
        except AuditUnavailableError as error:
            raise ToolError(Failure.INTERNAL, "It could not be recorded.") from error
        self._log.info(event, **facts)

    def _failed(self, event: str, identity: Identity, error: Exception) -> ToolError:
        self._log.error(event, node_id=identity.node_id, reason=printable(str(error)))
        return ToolError(Failure.INTERNAL, "The certificate authority cannot do that at present.")

    def _refused(self, event: str, identity: Identity, error: Exception) -> ToolError:
        # The text is for our log: what the ledger holds of a node is not shown to one that asks for it.
        self._log.warning(event, node_id=identity.node_id, reason=printable(str(error)))
        return ToolError(Failure.ATTESTATION_FAILED, "The certificate authority does not do that.")
