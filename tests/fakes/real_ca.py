"""The product's own CA around a hub: nodes whose leaves are in a ledger, and can be revoked in it."""

import json
import os
import stat
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256
from nacl.signing import SigningKey

from relay.pki.authority import CertificateAuthority
from schemas.certificates import make_csr
from schemas.identity import certificates_in, to_pem
from tests.fakes.clock import FakeClock
from tests.fakes.hub import Hub
from tests.fakes.signer import NODE_ID, NOW_MS, TENANT, SimulatedNode, key_named


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
        key = key or key_named(f"node {node_id}")
        leaf_pem = self.ca.issue(make_csr(key, node_id), tenant, replace=replace)
        return SimulatedNode(node_id, tenant, key, leaf_pem, self.ca.root_pem())

    def renewed(self, node: SimulatedNode, leaf_pem: str | None = None) -> SimulatedNode:
        """Return ``node`` with another leaf for its key: ``leaf_pem``, or one that the CA makes now."""
        pem = leaf_pem or self.ca.renew(csr_of(node), node.node_id)
        leaf = to_pem(certificates_in(pem)[:1])
        return SimulatedNode(node.node_id, node.tenant, node.key, leaf, self.ca.root_pem())


def csr_of(node: SimulatedNode) -> str:
    return make_csr(node.key, node.node_id)


# --- A CA in a directory, and what a test reads of its files and certificates.


KEY = key_named("the node")
OTHER_KEY = key_named("another node")
CSR = make_csr(KEY, NODE_ID)
JOIN_ID, OTHER_JOIN_ID = "01HZX9K3M4P7Q8R9S0T1V2W3XY", "01HZX9K3M4P7Q8R9S0T1V2W3XZ"


def authority(directory: Path, clock: FakeClock | None = None) -> CertificateAuthority:
    return CertificateAuthority(directory, clock or FakeClock(NOW_MS), os.urandom)


def created(directory: Path, clock: FakeClock | None = None) -> CertificateAuthority:
    """Return one that is made there."""
    ca = authority(directory, clock)
    ca.create()
    return ca


def ledger(ca: CertificateAuthority) -> list[dict[str, Any]]:
    text = ca.root_file.with_name("ledger.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


def files(ca: CertificateAuthority) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in ca.root_file.parent.iterdir()}


def kid_of(pem: str) -> str:
    return x509.load_pem_x509_certificate(pem.encode()).fingerprint(SHA256()).hex()


def serial_of(pem: str) -> int:
    return x509.load_pem_x509_certificate(pem.encode()).serial_number


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def revoked_in(crls: str) -> list[set[int]]:
    lists = [f"-----BEGIN X509 CRL-----{part}" for part in crls.split("-----BEGIN X509 CRL-----")[1:]]
    return [{entry.serial_number for entry in x509.load_pem_x509_crl(text.encode())} for text in lists]
