"""The state directory of one relay of a fleet, as far as its ledgers are shared: real files, and a CA."""

import os
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from relay.pki.authority import CertificateAuthority
from relay.settings.config import ClusterConfig
from relay.state.join_tokens import JoinTokens
from relay.state.kinds import (
    CERTIFICATES,
    JOIN_TOKENS,
    KINDS,
    NODE_NAMES,
    REVOKED_TOKENS,
    VERIFYING_KEYS,
    StateKind,
    files_of,
    shared_ledgers,
)
from relay.state.merging import Merging, SharedLedger
from relay.state.names import NameLedger
from relay.state.tokens import RevokedTokens, TokenKeys
from schemas.certificates import make_csr
from schemas.identity import first_certificate_in, kid_of
from schemas.process.logs import make_logger
from schemas.registry import SchemaRegistry
from tests.fakes.clock import FakeClock
from tests.fakes.cluster import TENANT, Member
from tests.fakes.lines import LogLines
from tests.fakes.signer import NOW_MS, key_named


@dataclass
class Machine:
    """One relay's state directory with a CA of its own, which knows no node of the others.

    Attributes:
        keys, join_tokens: as the relay reads them.
        lines: what it has logged of them.
    """

    directory: Path
    ca: CertificateAuthority
    tokens: RevokedTokens
    names: NameLedger
    keys: TokenKeys
    join_tokens: JoinTokens
    clock: FakeClock
    issues: bool
    lines: LogLines = field(default_factory=LogLines)
    refused: int = 0
    kinds: Sequence[StateKind] = KINDS

    @classmethod
    def made(cls, directory: Path, *, issues: bool) -> "Machine":
        """Return one that has decided nothing; ``issues``: the CA's key is there."""
        CertificateAuthority(directory / "ca", FakeClock(NOW_MS), os.urandom).create()
        return cls.at(directory, issues=issues)

    @classmethod
    def like(cls, other: "Machine", directory: Path) -> "Machine":
        """Return one of the same CA without its key, which has decided nothing."""
        shutil.copytree(other.directory / "ca", directory / "ca", ignore=shutil.ignore_patterns("*.key"))
        return cls.at(directory, issues=False)

    @classmethod
    def restored(cls, other: "Machine", directory: Path) -> "Machine":
        """Return one that a backup of ``other`` is restored to, as it is now."""
        shutil.copytree(other.directory, directory)
        return cls.at(directory, issues=other.issues)

    @classmethod
    def at(cls, directory: Path, *, issues: bool) -> "Machine":
        """Return the one whose files are in ``directory``."""
        clock = FakeClock(NOW_MS)
        ca = CertificateAuthority(directory / "ca", clock, os.urandom)
        tokens = RevokedTokens(directory / "revoked_tokens.jsonl")
        names = NameLedger(directory / "node_names.jsonl", clock)
        keys = TokenKeys(directory / "token_keys.jsonl", ca, clock)
        join_tokens = JoinTokens(directory / "join_tokens.jsonl", clock, os.urandom)
        return cls(directory, ca, tokens, names, keys, join_tokens, clock, issues)

    def issued(self, node_id: str) -> str:
        """Return the kid of a node's certificate."""
        return kid_of(first_certificate_in(self.ca.issue(make_csr(key_named(node_id), node_id), TENANT)))

    @property
    def ledgers(self) -> Sequence[SharedLedger]:
        """What it shares."""
        merging = Merging(
            self.clock,
            make_logger("relay", self.lines),
            issues=self.issues,
            is_endorsed={"token_key": self.keys.is_endorsed},
            refused=self._count_refused,
        )
        others = {file: file.ledger(self.directory) for file in files_of(self.kinds)}
        return shared_ledgers(
            others
            | {
                CERTIFICATES: self.ca.ledger,
                REVOKED_TOKENS: self.tokens.ledger,
                VERIFYING_KEYS: self.keys.ledger,
                JOIN_TOKENS: self.join_tokens.ledger,
                NODE_NAMES: self.names.ledger,
            },
            merging,
            self.kinds,
        )

    def _count_refused(self, _kind: str) -> None:
        self.refused += 1

    @asynccontextmanager
    async def joined(self, cluster: ClusterConfig, registry: SchemaRegistry) -> AsyncIterator[Member]:
        """Hold a relay of it that is connected."""
        async with Member.joined(cluster, self.directory, registry, ledgers=self.ledgers) as member:
            yield member

    def revoke(self, node_id: str, member: Member) -> None:
        """Revoke as a command does, and let the relay notice it."""
        self.ca.revoke(node_id)
        member.part.ledgers.changed("revocation")

    @property
    def labels(self) -> dict[str, str]:
        """The nodes that have a label."""
        return {node_id: name.label for node_id, name in self.names.read().by_node.items() if name.label}

    @property
    def revoked(self) -> frozenset[str]:
        """The kids that are revoked."""
        return self.ca.revoked_kids()
