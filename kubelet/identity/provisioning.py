"""The identity of a node: created on the node, then certified by a CA.

Must not be imported by the running daemon: it needs the X.509 library.
"""

from collections.abc import Callable

from nacl.signing import SigningKey

from schemas.certificates import IdentityError, make_csr, self_signed_leaf, verify_leaf
from schemas.endorsement import is_endorsed
from schemas.identity import Identity, certificates_in, kid_of, to_pem
from schemas.identity_files import IdentityFiles, IdentityFilesError
from schemas.node_ids import new_node_id

_SELF_SIGNED_DAYS = 3650
_SERIAL_BYTES = 16


def create_identity(files: IdentityFiles, now_ms: int, random_bytes: Callable[[int], bytes]) -> str:
    """Mint node id, key, certificate request and self-signed leaf; return the node id.

    Raises:
        IdentityFilesError: there is an identity already. It is never overwritten.
    """
    if files.exists():
        raise IdentityFilesError(f"{files.root} holds an identity already")
    node_id = new_node_id(now_ms, random_bytes)
    key = SigningKey(random_bytes(32))
    serial = int.from_bytes(random_bytes(_SERIAL_BYTES), "big") >> 1 | 1
    leaf = self_signed_leaf(key, node_id, now_ms, _SELF_SIGNED_DAYS, serial)
    files.write(node_id, key, leaf, make_csr(key, node_id))
    return node_id


def install_renewed(
    files: IdentityFiles, leaf_pem: str, roots_pem: str, now_ms: int, endorsement: str | None = None
) -> Identity:
    """Install a leaf that came over the session, and the roots that are trusted from now on.

    Raises:
        IdentityFilesError: as ``install_certificate``, or one of the roots is neither trusted by this node
            nor endorsed by one that is: roots are public, so a good one proves nothing of those beside it,
            and an attacker in the place of the relay for a moment must not become a root for good.
    """
    trusted = roots_in(files.read().root_pem or "")
    for root in roots_in(roots_pem):
        if root not in trusted and not is_endorsed(root, trusted, endorsement or ""):
            raise IdentityFilesError("a root is neither trusted by this node nor endorsed by one that is")
    return install_certificate(files, leaf_pem, roots_pem, now_ms)


def install_certificate(files: IdentityFiles, leaf_pem: str, root_pem: str, now_ms: int) -> Identity:
    """Install a leaf that a CA issued, and the root that it chains to.

    Raises:
        IdentityFilesError: it is not a leaf of that root, not valid now, or not for this node and its key.
    """
    own, roots = files.read(), roots_in(root_pem)
    try:
        identity = verify_leaf(leaf_pem, [root_pem], now_ms)
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
    # Encoded again: a key that was left in the root's file would be published with it.
    files.install(identity.pem, to_pem(roots))
    return identity


def roots_in(pem: str) -> list[bytes]:
    """Return the DER of each root in ``pem``.

    Raises:
        IdentityFilesError: it is too large, or a certificate in it is damaged.
    """
    try:
        return certificates_in(pem)
    except ValueError as error:
        raise IdentityFilesError(f"the roots cannot be used: {error}") from None
