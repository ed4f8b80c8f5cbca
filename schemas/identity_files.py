"""A node's identity as files: what ``kubelet init`` and the relay's CA write, and the daemon reads.

| file | mode | holds |
|---|---|---|
| `node_id` | 0644 | the node id and a newline |
| `node.key` | 0600 | the Ed25519 key, PKCS #8 PEM |
| `node.csr` | 0644 | the certificate request for a CA |
| `leaf.pem` | 0644 | the leaf: self-signed until a CA's is installed |
| `root.pem` | 0644 | the root that has issued it; absent while the leaf is self-signed |
| `server-roots.pem` | 0644 | the roots of relay and broker; absent until the relay has told of them |

Must not judge certificates: what it reads is what lies there.
"""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nacl.signing import SigningKey

from schemas.error_roots import StateError
from schemas.files import (
    PRIVATE,
    make_private_directory,
    read_private,
    read_state,
    write_atomic,
    write_unsynced,
)
from schemas.identity import CertificateFormatError, first_certificate_in, is_for_key, kid_of
from schemas.keys import KeyFormatError, private_key_from_pem, private_key_to_pem
from schemas.projection import is_node_id


class IdentityFilesError(StateError):
    """The identity cannot be used; the text states what to do."""


@dataclass(slots=True)
class NodeIdentity:
    """A node's own identity: it holds the secret, so it must not be logged or sent.

    Attributes:
        root_pem: every root that this node trusts; None while the leaf is self-signed.
        previous_leaf_pem: the leaf before the one that was renewed, until the process ends.
    """

    node_id: str
    key: SigningKey
    leaf_pem: str
    root_pem: str | None
    previous_leaf_pem: str = ""

    @property
    def kid(self) -> str:
        return kid_of(first_certificate_in(self.leaf_pem))

    @property
    def chain_pem(self) -> str:
        """What the node publishes of itself: the leaf, at renewal the one before, then the roots."""
        return self.leaf_pem + self.previous_leaf_pem + (self.root_pem or "")

    def renew(self, leaf_pem: str, root_pem: str | None) -> None:
        """Go on with another leaf for the same key, wherever this identity is used."""
        self.previous_leaf_pem, self.leaf_pem, self.root_pem = self.leaf_pem, leaf_pem, root_pem

    def sign(self, message: bytes) -> bytes:
        """Return the 64-byte signature of ``message`` with the leaf's key."""
        return self.key.sign(message).signature

    def __repr__(self) -> str:
        return f"NodeIdentity({self.node_id})"


class IdentityFiles:
    """The identity in the directory ``root``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.node_id = root / "node_id"
        self.key = root / "node.key"
        self.csr = root / "node.csr"
        self.leaf = root / "leaf.pem"
        self.root_certificate = root / "root.pem"
        self.server_roots = root / "server-roots.pem"

    def exists(self) -> bool:
        """Return whether an identity was made here: whether there is a key."""
        return self.key.exists()

    def are_absent(self) -> bool:
        """Return whether there is nothing of an identity here, not even a damaged one.

        Raises:
            OSError: that cannot be seen.
        """
        for path in (self.node_id, self.key):
            with suppress(FileNotFoundError):
                path.lstat()
                return False
        return True

    def write(self, node_id: str, key: SigningKey, leaf_pem: str, csr_pem: str | None = None) -> None:
        """Write a new identity. The key comes last: when it is there, all of it is."""
        make_private_directory(self.root)
        write_atomic(self.node_id, node_id + "\n")
        if csr_pem is not None:
            write_atomic(self.csr, csr_pem)
        write_atomic(self.leaf, leaf_pem)
        write_atomic(self.key, private_key_to_pem(key), PRIVATE)

    def write_mock(
        self, node_id: str, key: SigningKey, leaf_pem: str, root_pem: str, server_roots_pem: str
    ) -> None:
        """Write a whole new identity of a mock node. A power cut may lose it: it can be made again.

        Raises:
            OSError: there is one already, or it cannot be written.
        """
        make_private_directory(self.root)
        write_unsynced(self.node_id, node_id + "\n")
        write_unsynced(self.leaf, leaf_pem)
        write_unsynced(self.root_certificate, root_pem)
        write_unsynced(self.server_roots, server_roots_pem)
        write_unsynced(self.key, private_key_to_pem(key), PRIVATE)

    def install(self, leaf_pem: str, root_pem: str, server_roots_pem: str = "") -> None:
        """Replace leaf and roots by those of a CA; the caller has verified them.

        Without ``server_roots_pem``, servers are verified as before.
        """
        write_atomic(self.root_certificate, root_pem)
        if server_roots_pem:
            write_atomic(self.server_roots, server_roots_pem)
        write_atomic(self.leaf, leaf_pem)

    def remove(self) -> None:
        """Remove the identity for good, the key first: nothing can be signed with it any more."""
        certificates = (self.leaf, self.csr, self.root_certificate, self.server_roots)
        for path in (self.key, *certificates, self.node_id):
            path.unlink(missing_ok=True)

    def read_node_id(self) -> str:
        """Return the node id, also of an identity that is damaged otherwise.

        Raises:
            IdentityFilesError: there is none.
            OSError: it cannot be read.
        """
        try:
            node_id = read_state(self.node_id).decode("utf-8", "replace").strip()
        except FileNotFoundError:
            node_id = ""
        if not is_node_id(node_id):
            raise IdentityFilesError(f"{self.node_id} holds no node id")
        return node_id

    def leaf_pem(self) -> str:
        """Return the leaf.

        Raises:
            OSError: it cannot be read.
            IdentityFilesError: it is not text.
        """
        return self._text(self.leaf)

    def root_pem(self) -> str | None:
        """Return the roots that this node trusts; None while its leaf is self-signed.

        Raises:
            OSError: they cannot be read.
            IdentityFilesError: they are not text, or hold no certificate.
        """
        try:
            roots = self._text(self.root_certificate)
        except FileNotFoundError:
            return None
        _first_certificate(self.root_certificate, roots)
        return roots

    def read(self) -> NodeIdentity:
        """Return the identity.

        Raises:
            IdentityFilesError: it is missing, damaged, or a file of it is not to be believed.
        """
        try:
            node_id = read_state(self.node_id).decode("utf-8").strip()
            key = private_key_from_pem(read_private(self.key))
            leaf = self.leaf_pem()
            root = self.root_pem()
        except FileNotFoundError as error:
            raise IdentityFilesError(f"{error.filename} is missing: run `edge-kubelet init`") from None
        except KeyFormatError as error:
            raise IdentityFilesError(f"{self.key}: {error}") from None
        except UnicodeDecodeError:
            # Without the error's own text, which shows a byte of what may be the key.
            raise IdentityFilesError(f"a file in {self.root} is damaged: it is not text") from None
        except OSError as error:
            raise IdentityFilesError(str(error)) from None
        if not is_node_id(node_id):
            raise IdentityFilesError(f"{self.node_id} holds no node id")
        identity = NodeIdentity(node_id, key, leaf, root)
        der = _first_certificate(self.leaf, leaf)
        if not is_for_key(der, bytes(key.verify_key)):
            raise IdentityFilesError(f"{self.leaf} is not for the key in {self.key}")
        return identity

    def _text(self, file: Path) -> str:
        try:
            return read_state(file).decode("utf-8")
        except UnicodeDecodeError:
            raise IdentityFilesError(f"a file in {self.root} is damaged: it is not text") from None


def _first_certificate(file: Path, text: str) -> bytes:
    """Return the first certificate in ``text``, which ``file`` holds, as DER.

    Raises:
        IdentityFilesError: there is none, or one that is not base64.
    """
    try:
        return first_certificate_in(text)
    except CertificateFormatError as error:
        raise IdentityFilesError(f"{file} holds no certificate: {error}") from None
