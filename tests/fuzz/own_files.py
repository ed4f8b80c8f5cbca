"""Targets: files that are read by other libraries: a database, certificates and keys, encrypted backups.

As of ``files``: a torn disk or a hand can have put anything there.
"""

import shutil
import sqlite3
from contextlib import closing
from functools import cache
from typing import Final

import pyrage  # type: ignore[import-untyped]  # the library brings no types
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from relay.broker.supervisor import end_leftover
from relay.cli.backup.archive import EncryptionError, decrypt_for, encrypt_for, is_encrypted
from relay.fleet.leaves import KeptLeaves
from relay.fleet.replay_marks import KeptLeaf, MarkStore, snapshot
from relay.pki.relay_tls import WantedCertificate, reason_to_renew
from schemas.certificates import RELAY_NAME
from schemas.identity_files import IdentityFiles, IdentityFilesError
from schemas.keys import private_key_to_pem
from schemas.process.logs import make_logger
from schemas.trust import HighWaterMark
from tests.fakes.lines import LogLines
from tests.fakes.signer import NODE_ID, NOW_MS, TENANT
from tests.fuzz import samples
from tests.fuzz.scratch import directory, scratch
from tests.fuzz.target import REFUSED, Target, text_of, tried

_MARKS: Final = "marks.sqlite3"


def marks(data: bytes) -> None:
    """A damaged database is refused, or what is left of it is used: never a leaf that it does not fit."""
    path = directory() / "marks"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(mode=0o700)
    scratch(f"marks/{_MARKS}", data)
    store = tried(lambda: MarkStore(path, make_logger("relay", LogLines())), OSError)
    if store is REFUSED:
        return
    found = tried(lambda: list(store.load()), OSError)
    if found is not REFUSED:
        assert all(isinstance(mark.issued_at_ms, int) for _, _, mark in found)
    leaves = tried(lambda: store.load_leaves(NOW_MS), OSError)
    if leaves is not REFUSED:
        recalled = KeptLeaves(leaves).recall(samples.NODE.leaf_pem, [samples.CA.root_pem], NOW_MS)
        assert recalled is None or recalled == samples.NODE.identity()


def identity_files(data: bytes) -> None:
    """A node's key and leaf belong together, or the files are refused without a byte of the key."""
    node_id, key, leaf, root = [*data.split(b"\0", 3), b"", b"", b"", b""][:4]
    files = IdentityFiles(directory() / "identity")
    for path, content in (
        (files.node_id, node_id),
        (files.key, key),
        (files.leaf, leaf),
        (files.root_certificate, root),
    ):
        scratch(str(path.relative_to(directory())), content)
    read = tried(files.read, IdentityFilesError, secret=text_of(key))
    if read is not REFUSED:
        assert private_key_to_pem(read.key)


def served_certificate(data: bytes) -> None:
    """A certificate is used on for as long as it is the one that is wanted, whatever is in its file."""
    key = Ed25519PublicKey.from_public_bytes(samples.NODE.public_key)
    # As the file is read.
    held = data.decode("utf-8", "replace")
    reason = reason_to_renew(
        held, WantedCertificate(RELAY_NAME, frozenset({NODE_ID}), key), [samples.CA.root_pem], NOW_MS
    )
    assert reason in {"none", "another", "names", "age", "root"}


def broker_leftover(data: bytes) -> None:
    """A record of no process of ours ends none."""
    assert tried(lambda: end_leftover(scratch("broker.pid", data), directory() / "none"), OSError) in {
        None,
        REFUSED,
    }


def encrypted_backup(data: bytes) -> None:
    """What is damaged is refused, in words of ours."""
    identity = _age_identity()
    opened = tried(lambda: decrypt_for(data, identity), EncryptionError, secret=identity)
    assert opened is REFUSED or is_encrypted(data)
    text = data.decode("utf-8", "replace")
    tried(lambda: decrypt_for(_encrypted(), text), EncryptionError, secret=text)


@cache
def _age_identity() -> str:
    return str(pyrage.x25519.Identity.generate())


@cache
def _encrypted() -> bytes:
    recipient = pyrage.x25519.Identity.from_str(_age_identity()).to_public()
    return encrypt_for(b"a backup", [str(recipient)])


def _database() -> bytes:
    """Return a database with a mark and a leaf, of small pages."""
    path = directory() / "good-marks"
    store = MarkStore(path, make_logger("relay", LogLines()))
    store.put(NODE_ID, TENANT, HighWaterMark(NOW_MS, "ab" * 32))
    store.put_leaf(KeptLeaf.of(samples.NODE.identity()))
    store._write(*store._take())  # noqa: SLF001 - as its loop does once a second
    with closing(sqlite3.connect(path / _MARKS)) as database:
        database.execute("PRAGMA page_size = 512")
        database.execute("VACUUM")
    content = snapshot(path)
    assert content is not None
    return content


_IDENTITY: Final = (NODE_ID, private_key_to_pem(samples.NODE.key), samples.NODE.leaf_pem, samples.CA.root_pem)
TARGETS: Final = {
    "marks": Target(marks, (_database(),), max_bytes=1 << 14),
    "identity_files": Target(identity_files, ("\0".join(_IDENTITY).encode(),)),
    "served_certificate": Target(served_certificate, samples.LEAVES),
    "broker_leftover": Target(broker_leftover, (b"1 5\n", b"4194304 12345\n"), max_bytes=256),
    "encrypted_backup": Target(encrypted_backup, (_encrypted(), b"# comment\n" + _age_identity().encode())),
}
