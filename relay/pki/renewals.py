"""What a node asks of the certificate authority over its session: another leaf, or to be forgotten.

The CA's files are locked while it works, so it works in a thread. Must not speak frames.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from structlog.typing import FilteringBoundLogger

from relay.audit.log import AuditLog, AuditUnavailableError
from relay.ledger import LedgerError
from relay.pki.authority import AuthorityError
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
        """Return the roots that are trusted now."""
        ...

    def endorsement(self) -> str | None:
        """Return by what the root before the current one vouches for it."""
        ...

    def revoke(self, target: str, reason: str = "revoked") -> list[str]:
        """Revoke the leaves of a node; return their kids."""
        ...


class Renewals:
    """Renews and retires nodes whose session has proven who they are. What is not recorded is not done."""

    def __init__(
        self, ca: LeafAuthority, audit: AuditLog, now_ms: Callable[[], int], log: FilteringBoundLogger
    ) -> None:
        self._ca = ca
        self._audit = audit
        self._now_ms = now_ms
        self._log = log
        self._renewed_ms: dict[str, int] = {}
        self._turns = asyncio.Semaphore(_AT_ONCE)

    async def renew(self, identity: Identity, csr_pem: str) -> dict[str, str]:
        """Return ``certificate`` and ``roots``, what the node installs; ``endorsement`` after a rotation.

        Raises:
            ToolError: ATTESTATION_FAILED: the request is not for this node and its key, or the CA cannot;
                RATE_LIMITED: the leaf is not half used up, or was renewed just now.
        """
        self._check_due(identity)
        async with self._turns:
            try:
                leaf = await asyncio.to_thread(self._ca.renew, csr_pem, identity.node_id)
                roots = await asyncio.to_thread(self._ca.roots)
                # After the roots: one of a rotation that comes in between says nothing against them.
                endorsement = await asyncio.to_thread(self._ca.endorsement)
            except (AuthorityError, LedgerError, OSError) as error:
                raise self._refused("renewal refused", identity, error) from None
        self._record("renewed", identity, kid_of(certificates_in(leaf)[0]))
        issued = {"certificate": leaf, "roots": "".join(roots)}
        return issued if endorsement is None else {**issued, "endorsement": endorsement}

    def _check_due(self, identity: Identity) -> None:
        """Refuse what would only fill the ledger: each leaf is an entry that stays."""
        now = self._now_ms()
        half = (identity.not_before_ms + identity.not_after_ms) // 2
        due = max(half, self._renewed_ms.get(identity.node_id, -_AGAIN_AFTER_MS) + _AGAIN_AFTER_MS)
        if now < due:
            raise ToolError(Failure.RATE_LIMITED, "It is too early.", retry_after_ms=due - now)
        self._renewed_ms[identity.node_id] = now

    async def retire(self, identity: Identity) -> None:
        """Revoke every leaf of the node.

        Raises:
            ToolError: ATTESTATION_FAILED: the CA cannot do it.
        """
        async with self._turns:
            try:
                kids = await asyncio.to_thread(self._ca.revoke, identity.node_id, "retired")
            except (AuthorityError, LedgerError, OSError) as error:
                raise self._refused("retirement refused", identity, error) from None
        for kid in kids:
            self._record("retired", identity, kid)

    def _record(self, event: str, identity: Identity, kid: str) -> None:
        facts = {"node_id": identity.node_id, "tenant": identity.tenant, "kid": kid}
        try:
            self._audit.write(event=event, **facts)
        except AuditUnavailableError as error:
            raise ToolError(Failure.INTERNAL, "It could not be recorded.") from error
        self._log.info(event, **facts)

    def _refused(self, event: str, identity: Identity, error: Exception) -> ToolError:
        # The text may name files of this machine: it is for our log, not for the node.
        self._log.warning(event, node_id=identity.node_id, reason=printable(str(error)))
        return ToolError(Failure.ATTESTATION_FAILED, "The certificate authority does not do that.")
