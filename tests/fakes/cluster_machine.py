"""The state directory of one relay of a fleet, as far as its ledgers are shared: real files, and a CA."""

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from relay.auth.revoked_tokens import RevokedTokens
from relay.auth.shared_revocations import SharedTokenRevocations
from relay.config import ClusterConfig
from relay.fleet.name_ledger import NameLedger
from relay.fleet.shared_names import SharedNames
from relay.pki.authority import CertificateAuthority
from relay.pki.shared_leaves import SharedLeaves
from relay.pki.shared_revocations import SharedRevocations
from relay.shared_ledger import SharedLedger
from schemas.certificates import make_csr
from schemas.identity import certificates_in, kid_of
from schemas.process.logs import make_logger
from schemas.registry import SchemaRegistry
from tests.fakes.clock import FakeClock
from tests.fakes.cluster import TENANT, Member
from tests.fakes.lines import LogLines
from tests.fakes.signer import NOW_MS, key_named


@dataclass
class Machine:
    """One relay's state directory with a CA of its own, which knows no node of the others."""

    directory: Path
    ca: CertificateAuthority
    tokens: RevokedTokens
    names: NameLedger
    issues: bool

    @classmethod
    def made(cls, directory: Path, *, issues: bool) -> "Machine":
        """Return one that has decided nothing; ``issues``: the CA's key is there."""
        ca = CertificateAuthority(directory / "ca", FakeClock(NOW_MS), os.urandom)
        ca.create()
        tokens = RevokedTokens(directory / "revoked_tokens.jsonl")
        names = NameLedger(directory / "node_names.jsonl", FakeClock(NOW_MS))
        return cls(directory, ca, tokens, names, issues)

    def issued(self, node_id: str) -> str:
        """Return the kid of a node's certificate."""
        return kid_of(certificates_in(self.ca.issue(make_csr(key_named(node_id), node_id), TENANT))[0])

    @property
    def ledgers(self) -> Sequence[SharedLedger]:
        """What it shares."""
        return (
            SharedRevocations(self.ca.ledger),
            SharedTokenRevocations(self.tokens),
            SharedLeaves(self.ca.ledger, issues=self.issues),
            SharedNames(self.names, make_logger("relay", LogLines())),
        )

    @asynccontextmanager
    async def joined(self, cluster: ClusterConfig, registry: SchemaRegistry) -> AsyncIterator[Member]:
        """Hold a relay of it that is connected."""
        async with Member.joined(cluster, self.directory, registry, ledgers=self.ledgers) as member:
            yield member

    def revoke(self, node_id: str, member: Member) -> None:
        """Revoke as a command does, and let the relay notice it."""
        self.ca.revoke(node_id)
        member.part.ledgers.changed()

    @property
    def labels(self) -> dict[str, str]:
        """The nodes that have a label."""
        return {node_id: name.label for node_id, name in self.names.read().by_node.items() if name.label}

    @property
    def revoked(self) -> frozenset[str]:
        """The kids that are revoked."""
        return self.ca.revoked_kids()
