"""Who renews and revokes the leaves of nodes: this relay's CA, or the relay that has the key of the CA.

Must not judge whether a renewal is due, and must not record anything: ``renewals`` does, for both.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from relay.pki.errors import AuthorityStateError, CertificateRefusedError
from relay.pki.server_authority import EndorsedRoots
from relay.routing.authority_port import (
    AuthorityAction,
    AuthorityRefusedError,
    AuthorityUnavailableError,
    RemoteAuthority,
)
from schemas.errors import Failure, ToolError
from schemas.payloads import Renewed


class HeldLeaf(Protocol):
    """The leaf that a node has shown. Times are milliseconds since the epoch."""

    @property
    def node_id(self) -> str:
        """Whose it is."""
        ...

    @property
    def tenant(self) -> str:
        """The tenant of the node."""
        ...

    @property
    def kid(self) -> str:
        """Its thumbprint."""
        ...

    @property
    def not_before_ms(self) -> int:
        """When it begins."""
        ...

    @property
    def not_after_ms(self) -> int:
        """When it ends."""
        ...


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
    """The part of the CA that nodes reach."""

    def renew(self, csr_pem: str, node_id: str) -> str:
        """Return a new leaf for the node and the key that the ledger binds to it."""
        ...

    def roots(self) -> list[str]:
        """Return the roots of nodes that are trusted now."""
        ...

    def endorsement(self) -> str | None:
        """Return the endorsement of the current root by the one before it."""
        ...

    def server_roots(self) -> EndorsedRoots:
        """Return the roots of servers that are trusted now, and their endorsements by those of nodes."""
        ...

    def revoke(self, target: str, reason: str = "revoked") -> list[str]:
        """Revoke the leaves of a node; return their kids."""
        ...


class OwnLeaves:
    """A ``LeafIssuer`` by this relay's CA, which waits for locks and for the disk, so it runs on a thread."""

    def __init__(self, ca: LeafAuthority) -> None:
        self._ca = ca

    async def renew(self, held: HeldLeaf, csr_pem: str, *, server_roots: bool) -> Renewed:
        """Renew, as ``LeafIssuer`` describes."""
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
        """Retire, as ``LeafIssuer`` describes."""
        return await asyncio.to_thread(self._ca.revoke, held.node_id, "retired")


class ForwardedLeaves:
    """A ``LeafIssuer`` by the relay that has the CA's key."""

    def __init__(self, authority: RemoteAuthority) -> None:
        self._authority = authority

    async def renew(self, held: HeldLeaf, csr_pem: str, *, server_roots: bool) -> Renewed:
        """Renew, as ``LeafIssuer`` describes."""
        asked = {"node_id": held.node_id, "kid": held.kid, "csr": csr_pem, "server_roots": server_roots}
        try:
            answer = await self._authority.ask(AuthorityAction.RENEW, asked)
        except (AuthorityUnavailableError, AuthorityRefusedError) as error:
            raise _as_ours(error) from None
        issued = Renewed(certificate=answer["certificate"], roots=answer["roots"])
        if "endorsement" in answer:
            issued["endorsement"] = answer["endorsement"]
        if server_roots and "server_roots" in answer:
            issued["server_roots"] = answer["server_roots"]
            issued["server_endorsements"] = answer.get("server_endorsements", [])
        return issued

    async def retire(self, held: HeldLeaf) -> Sequence[str]:
        """Retire, as ``LeafIssuer`` describes."""
        asked = {"node_id": held.node_id, "kid": held.kid}
        try:
            answer = await self._authority.ask(AuthorityAction.RETIRE, asked)
        except (AuthorityUnavailableError, AuthorityRefusedError) as error:
            raise _as_ours(error) from None
        kids: list[str] = answer["kids"]
        return kids


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
