"""Simulated nodes as the kubelet has them: an identity in memory or in files."""

from pathlib import Path

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
