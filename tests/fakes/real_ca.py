"""The product's own CA around a hub: nodes whose leaves are in a ledger, and can be revoked in it."""

import os
from pathlib import Path

from nacl.signing import SigningKey

from relay.pki.authority import CertificateAuthority
from schemas.certificates import make_csr
from schemas.identity import certificates_in, to_pem
from tests.fakes.hub import Hub
from tests.fakes.signer import NODE_ID, TENANT, SimulatedNode, key_named


class RealCa:
    """A CA in ``directory`` that the relay of ``hub`` believes.

    Attributes:
        ca: as the relay's process has it; ``as_operator`` is another one, as a command has it.
    """

    def __init__(self, hub: Hub, directory: Path) -> None:
        self._hub = hub
        self._directory = directory
        self.ca = CertificateAuthority(directory, hub.clock, os.urandom)
        self.ca.create()
        hub.fleet.change_trust(self.ca.roots(), frozenset())

    def as_operator(self) -> CertificateAuthority:
        """Return the CA as a command on the same machine opens it."""
        return CertificateAuthority(self._directory, self._hub.clock, os.urandom)

    def node(
        self,
        node_id: str = NODE_ID,
        tenant: str = TENANT,
        *,
        key: SigningKey | None = None,
        replace: bool = False,
    ) -> SimulatedNode:
        """Return a node that was enrolled."""
        key = key or key_named(f"node {node_id}")
        leaf_pem = self.ca.issue(make_csr(key, node_id), tenant, replace=replace)
        return SimulatedNode(node_id, tenant, key, leaf_pem, self.ca.root_pem())

    def renewed(self, node: SimulatedNode, leaf_pem: str | None = None) -> SimulatedNode:
        """Return ``node`` with another leaf for its key: ``leaf_pem``, or one that the CA makes now."""
        pem = leaf_pem or self.ca.renew(csr_of(node), node.node_id)
        leaf = to_pem(certificates_in(pem)[:1])
        return SimulatedNode(node.node_id, node.tenant, node.key, leaf, self.ca.root_pem())


def csr_of(node: SimulatedNode) -> str:
    """Return the certificate request of ``node``."""
    return make_csr(node.key, node.node_id)
