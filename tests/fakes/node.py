"""Simulated nodes as the kubelet has them: an identity in memory or in files."""

from pathlib import Path

from kubelet.announce.announcer import Announcer
from schemas.identity_files import IdentityFiles, NodeIdentity
from tests.fakes.signer import SimulatedNode


def identity_of(node: SimulatedNode) -> NodeIdentity:
    """Return the identity that the daemon of ``node`` reads from its files."""
    return NodeIdentity(node.node_id, node.key, node.leaf_pem, node.root_pem)


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
