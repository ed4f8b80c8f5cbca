"""Simulated nodes as the kubelet has them: an identity in memory or in files."""

from pathlib import Path
from typing import Any

from structlog.typing import FilteringBoundLogger

from kubelet.announce.announcer import Announcer
from kubelet.announce.signer import ManifestSigner
from schemas.identity_files import IdentityFiles, NodeIdentity
from schemas.registry import SchemaRegistry
from tests.fakes.clock import FakeClock, hurried_ticks
from tests.fakes.signer import ECHO, TTL_MS, SimulatedNode

HARDWARE = {"algo": "blake3-256", "value": "ab" * 32, "sources": ["machine_id"]}


def identity_of(node: SimulatedNode) -> NodeIdentity:
    """Return the identity that the daemon of ``node`` reads from its files."""
    return NodeIdentity(node.node_id, node.key, node.leaf_pem, node.root_pem)


def signer_of(
    node: SimulatedNode, clock: FakeClock, registry: SchemaRegistry, log: FilteringBoundLogger, **facts: Any
) -> ManifestSigner:
    """Return what signs the manifests of ``node``, which has echo alone; ``facts`` replace what it states."""
    usual: dict[str, Any] = {
        "hw_fingerprint": HARDWARE,
        "capabilities": [ECHO],
        "ttl_ms": TTL_MS,
        "last_issued": None,
        "ticks_ms": hurried_ticks(),
    }
    return ManifestSigner(
        identity=identity_of(node), now_ms=clock, registry=registry, log=log, **(usual | facts)
    )


def write_identity(directory: Path, node: SimulatedNode) -> IdentityFiles:
    """Write the identity of ``node``, enrolled, below ``directory``."""
    files = IdentityFiles(directory)
    files.write(node.node_id, node.key, node.leaf_pem)
    files.install(node.leaf_pem, node.root_pem)
    return files


def announce_again(announcer: Announcer) -> None:
    """Make ``announcer`` announce at once: as if a relay had accepted what is current already."""
    assert announcer.current is not None
    announcer.advance_past(announcer.current.issued_at_ms)
