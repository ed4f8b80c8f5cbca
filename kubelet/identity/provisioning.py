"""The identity of a node: created on the node, then certified by a CA.

Must not be imported by the running daemon: it needs the X.509 library.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nacl.signing import SigningKey

from kubelet.config import NodeConfig, StoredConfigError, read_stored, relay_kinds_file, store
from kubelet.settings import BY_ENROLMENT
from schemas.addresses import normal_url, parse_broker
from schemas.certificates import (
    IdentityError,
    are_endorsed,
    is_endorsed,
    is_server_root,
    make_csr,
    self_signed_leaf,
    verify_leaf,
)
from schemas.error_roots import OperatorError
from schemas.identity import CertificateFormatError, Identity, certificates_in, kid_of, to_pem
from schemas.identity_files import IdentityFiles, IdentityFilesError, NodeIdentity
from schemas.settings import forget_run_options
from schemas.ulids import new_node_id

_SELF_SIGNED_DAYS = 3650
_SERIAL_BYTES = 16


def create_identity(
    files: IdentityFiles, now_ms: int, random_bytes: Callable[[int], bytes], node_id: str | None = None
) -> str:
    """Mint node id, key, certificate request and self-signed leaf; return the node id.

    With ``node_id``, that is kept.

    Raises:
        IdentityFilesError: there is an identity already. It is never overwritten.
    """
    if files.exists():
        raise IdentityFilesError(f"{files.root} holds an identity already")
    made = throw_away_identity(now_ms, random_bytes, node_id)
    files.write(made.node_id, made.key, made.leaf_pem, make_csr(made.key, made.node_id))
    return made.node_id


def throw_away_identity(
    now_ms: int, random_bytes: Callable[[int], bytes], node_id: str | None = None
) -> NodeIdentity:
    """Return a new identity with a self-signed leaf, which lies in no file."""
    node_id = node_id or new_node_id(now_ms, random_bytes)
    key = SigningKey(random_bytes(32))
    serial = int.from_bytes(random_bytes(_SERIAL_BYTES), "big") >> 1 | 1
    leaf = self_signed_leaf(key, node_id, now_ms, _SELF_SIGNED_DAYS, serial)
    return NodeIdentity(node_id, key, leaf, None)


@dataclass(frozen=True, slots=True)
class Issued:
    """What a CA issues to a node, all PEM.

    Attributes:
        roots: every root of nodes that is trusted now.
        server_roots: every root of servers; empty if the relay is of a version without.
        endorsement: of a new root, by one that is trusted; see ``schemas.certificates``.
        server_endorsements: of ``server_roots``, by roots of nodes.
    """

    certificate: str
    roots: str
    server_roots: str = ""
    endorsement: str = ""
    server_endorsements: Sequence[str] = ()


def install_renewed(files: IdentityFiles, issued: Issued, now_ms: int) -> Identity:
    """Install a leaf that came over the session, and the roots that are trusted from now on.

    Raises:
        IdentityFilesError: as ``install_certificate``, or one of the roots is neither trusted by this node
            nor endorsed by one that is: roots are public, so a good one proves nothing of those beside it,
            and an attacker in the place of the relay for a moment must not become a root for good.
    """
    trusted = roots_in(files.read().root_pem or "")
    for root in roots_in(issued.roots):
        if root not in trusted and not is_endorsed(root, trusted, issued.endorsement):
            raise IdentityFilesError("a root is neither trusted by this node nor endorsed by one that is")
    server_roots = roots_in(issued.server_roots)
    if server_roots and not are_endorsed(server_roots, trusted, issued.server_endorsements):
        raise IdentityFilesError("the roots of servers are not endorsed by a root that this node trusts")
    return install_certificate(files, issued, now_ms)


@dataclass(frozen=True, slots=True)
class Enrolled:
    """The result of an enrolment."""

    identity: Identity
    config: NodeConfig


def install_enrolled(files: IdentityFiles, issued: Issued, config: NodeConfig, now_ms: int) -> Enrolled:
    """Write all that ``kubelet run`` needs, whether it came over the network or was copied by an operator.

    Raises:
        IdentityFilesError: as ``install_certificate``.
    """
    identity = _verified(files, issued, now_ms)
    # The leaf comes last: when it is there, all of it is.
    store(config, files.root)
    relay_kinds_file(files.root).unlink(missing_ok=True)  # another relay may know other kinds
    forget_run_options(files.root, BY_ENROLMENT)
    _install(files, identity, issued)
    return Enrolled(identity, config)


def install_certificate(files: IdentityFiles, issued: Issued, now_ms: int) -> Identity:
    """Install a leaf that a CA issued, the roots of nodes that it chains to, and the roots of servers.

    Raises:
        IdentityFilesError: it is not a leaf of these roots, not valid now, or not for this node and its key;
            or a root of servers is not one.
    """
    identity = _verified(files, issued, now_ms)
    _install(files, identity, issued)
    return identity


def _verified(files: IdentityFiles, issued: Issued, now_ms: int) -> Identity:
    own, roots, server_roots = files.read(), roots_in(issued.roots), roots_in(issued.server_roots)
    try:
        identity = verify_leaf(issued.certificate, [issued.roots], now_ms)
    except IdentityError as error:
        raise IdentityFilesError(f"the certificate is not accepted: {error.reason}") from None
    # Verification accepts a leaf as its own root: a node that is not enrolled checks itself so.
    if any(kid_of(root) == identity.kid for root in roots):
        raise IdentityFilesError(
            "the root is the node's own certificate: name the root of the CA that issued it"
        )
    if identity.node_id != own.node_id:
        raise IdentityFilesError("the certificate is for another node")
    if identity.public_key != bytes(own.key.verify_key):
        raise IdentityFilesError("the certificate is for another key")
    if not all(map(is_server_root, server_roots)):
        raise IdentityFilesError("a root of servers is not restricted to servers")
    return identity


def _install(files: IdentityFiles, identity: Identity, issued: Issued) -> None:
    # Encoded again: a key that was left in the root's file would be published with it.
    roots, server_roots = to_pem(roots_in(issued.roots)), to_pem(roots_in(issued.server_roots))
    files.install(identity.pem, roots, server_roots)


def roots_in(pem: str) -> list[bytes]:
    """Return the DER of each root in ``pem``.

    Raises:
        IdentityFilesError: it is too large, or a certificate in it is damaged.
    """
    try:
        return certificates_in(pem)
    except CertificateFormatError as error:
        raise IdentityFilesError(f"the roots cannot be used: {error}") from None


def issued_by_hand(leaf_pem: str, roots_pem: str) -> Issued:
    """Return what an operator has copied from the CA: a leaf, and the roots of both kinds, in any order."""
    roots = roots_in(roots_pem)
    servers = [root for root in roots if is_server_root(root)]
    return Issued(leaf_pem, to_pem([root for root in roots if root not in servers]), to_pem(servers))


def _kept_kinds(state_dir: Path) -> tuple[str, ...]:
    """Return the kinds that the operator has enabled, which a certificate that is installed again leaves."""
    try:
        stored = read_stored(state_dir)
    except StoredConfigError:
        return ()
    return () if stored is None else stored.kinds


def install_by_hand(  # noqa: PLR0913 - what `kubelet enroll` learns from the relay
    files: IdentityFiles,
    issued: Issued,
    relays: Sequence[str],
    broker: str,
    *,
    system_roots: bool,
    plain_allowed: bool,
    now_ms: int,
) -> Enrolled:
    """Install ``issued``, and how the relays, the public URL first, and the broker are reached and verified.

    Raises:
        IdentityFilesError: as ``install_certificate``.
        OperatorError: the relay is to be verified by roots of servers, and there are none.
        AddressError: relay or broker may not be reached like this.
    """
    relay_url, *others = dict.fromkeys(map(normal_url, relays))
    own_root = relay_url.startswith("https://") and not system_roots
    if own_root and not issued.server_roots:
        raise OperatorError(
            "--root holds no root of servers: make it with `relay ca roots --pem`, or give --system-roots if "
            "this machine trusts the relay's certificate already"
        )
    config = NodeConfig(
        parse_broker(broker),
        relay_url,
        plain_allowed=plain_allowed,
        own_root=own_root,
        other_relays=tuple(others),
        kinds=_kept_kinds(files.root),
    )
    return install_enrolled(files, issued, config, now_ms)
