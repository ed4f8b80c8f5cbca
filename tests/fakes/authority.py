"""The service of the relay with the CA's key, made of real parts, for its tests and those of what asks it."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from relay.pki.authority import CertificateAuthority
from relay.pki.enrolments import EnrolmentInfo
from relay.pki.forwarding import AuthorityService
from relay.pki.renewals import OwnLeaves, Renewals
from relay.state.join_tokens import JoinTokens
from relay.state.names import NameLedger
from schemas.certificates import make_csr, verify_leaf
from schemas.identity import Identity
from tests.fakes.enrolling import KEY, enrolments_of, environment_of
from tests.fakes.environment import PUBLIC_URL
from tests.fakes.hub import Hub
from tests.fakes.signer import DAY_MS, NODE_ID, TENANT

CSR = make_csr(KEY, NODE_ID)


@dataclass(frozen=True, slots=True)
class Holder:
    """A relay with the CA's key: the service, and what it stands on."""

    hub: Hub
    ca: CertificateAuthority
    join_tokens: JoinTokens
    service: AuthorityService

    @classmethod
    def below(cls, directory: Path, hub: Hub) -> Self:
        """Return one with a new CA below ``directory``."""
        ca = CertificateAuthority(directory / "ca", hub.clock, os.urandom)
        ca.create()
        join_tokens = JoinTokens(directory / "join_tokens.jsonl", hub.clock, os.urandom)
        names = NameLedger(directory / "node_names.jsonl", hub.clock)
        info = EnrolmentInfo(PUBLIC_URL, None, own_root=True)
        service = AuthorityService(
            environment_of(hub, ca),
            enrolments=enrolments_of(hub, ca, join_tokens, names.name_new, info),
            renewals=Renewals(OwnLeaves(ca), hub.audit, hub.clock, hub.log),
            public_url=PUBLIC_URL,
        )
        return cls(hub, ca, join_tokens, service)

    def half_used_leaf(self) -> Identity:
        """Issue a leaf to the node, and return it once it is half used up."""
        leaf = verify_leaf(self.ca.issue(CSR, TENANT), self.ca.roots(), self.hub.clock())
        self.hub.clock.advance(60 * DAY_MS)
        return leaf
