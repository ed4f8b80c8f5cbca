"""Saves a relay's state as an archive, and restores one into an empty state directory.

A backup holds all that another machine needs to replace the relay: see ``StateFiles``. The audit is not part
of it, since a relay without one begins a new chain, nor are files that a relay writes by itself.

One for another relay of the same fleet lacks the keys that issue, and the join tokens; that relay gets keys
of its own, with certificates for the names that this relay has.
Must not encrypt, and must not decide where a backup goes.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import asdict
from json import dumps
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from nacl.signing import SigningKey

from relay.cli.backup.archive import MAX_BYTES, pack, unpack
from relay.fleet.replay_marks import snapshot
from relay.pki.authority import ENDORSEMENTS, CertificateAuthority
from relay.pki.relay_tls import RelayUse, issue_for_another_relay, public_key_pem
from relay.pki.roots import make_server_key, server_key_to_pem
from relay.settings.broker import broker_of_nodes
from relay.settings.config import DEFAULT_PUBLIC_URL, StateFiles
from relay.settings.kept import KeptSettings
from relay.state.kinds import KINDS, StateKind, files_of
from schemas.error_roots import OperatorError
from schemas.files import (
    PRIVATE,
    PUBLIC,
    make_private_directory,
    mode_without_secrets,
    read_state,
    sync_directory,
    write_atomic,
)
from schemas.keys import private_key_to_pem

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_ROOT, _ROOT_KEY, _ENDORSEMENTS = "ca/root.pem", "ca/root.key", "ca/server-endorsements"
MARKS = "marks/marks.sqlite3"
_CA_KEYS = frozenset({"ca/root.key", "ca/next.key", "ca/previous.key"}) | {
    *("ca/server-root.key", "ca/server-next.key", "ca/server-previous.key")
}
_REQUIRED = frozenset({_ROOT, "ca/ledger.jsonl"})
_POSSIBLE = (
    _REQUIRED
    | _CA_KEYS
    | {
        *("ca/previous.pem", "ca/server-root.pem", "ca/server-cross.pem", "ca/server-previous.pem"),
        *(_ENDORSEMENTS, "token.key", "settings.json", MARKS),
        *("tls/server.pem", "tls/server.key", "tls/relay.pem", "tls/relay.key"),
    }
)


_SECRET = frozenset({MARKS, *(name for name in _POSSIBLE if name.endswith(".key"))})
_PUBLIC = frozenset({"settings.json", *(name for name in _POSSIBLE if name.endswith(".pem"))})


class RestoreError(OperatorError):
    """Nothing was restored; the text says why."""


def save(
    state: StateFiles, ca: CertificateAuthority, now_ms: int, kinds: Iterable[StateKind] = KINDS
) -> bytes:
    """Return an archive of the relay's state, with the files of ``kinds``; it may be running.

    Raises:
        AuthorityStateError: there is no CA, or the root's key is not here.
        ArchiveTooLargeError: it is too large.
        OSError: a file cannot be read.
    """
    files: dict[str, bytes] = {}
    # Nothing is issued meanwhile. A join token may be spent: then the backup has that, and not its leaf.
    with ca.unchanged() as paths:
        ledgers = {file.in_directory(state.root) for file in files_of(kinds)}
        own = (state.own_tls, state.broker_client_tls)
        certificates = [path for pair in own for path in (pair.certificate, pair.key)]
        for path in sorted({*paths, *ledgers, state.token_key, state.settings, *certificates}):
            with suppress(FileNotFoundError):
                files[str(path.relative_to(state.root))] = read_state(path, MAX_BYTES)
    if (marks := snapshot(state.marks)) is not None:
        files[MARKS] = marks
    return pack(files, now_ms)


def write_new(path: Path, data: bytes) -> None:
    """Write ``data`` into a new file that only its owner can read.

    Raises:
        FileExistsError: the path exists; an older backup is never overwritten.
        OSError: it cannot be written; nothing is left of it.
    """
    descriptor = os.open(path, _NEW, PRIVATE)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
    sync_directory(path.parent)


def restore(archive: bytes, state: StateFiles, kinds: Iterable[StateKind] = KINDS) -> bool:
    """Write what ``save`` has returned into the state directory, all of it or nothing.

    Returns whether the CA's key is part of it: it is not in what ``another_relay`` saves.

    Raises:
        RestoreError: the directory is not empty, or the archive is incomplete.
        ArchiveError: it is no backup, or holds what no backup holds.
        OSError: it cannot be written; nothing is left of it.
    """
    files = unpack(archive, _POSSIBLE | {file.path for file in files_of(kinds)})
    # One for another relay of the fleet holds these in place of the keys.
    has_ca_key = _ENDORSEMENTS not in files
    if missing := (_REQUIRED | ({_ROOT_KEY} if has_ca_key else set())) - files.keys():
        raise RestoreError(f"the backup is not whole: it holds no {min(missing)}")
    make_private_directory(state.root)
    if any(state.root.iterdir()):
        raise RestoreError(f"{state.root} is not empty, and nothing in it is overwritten")
    # The root comes last: without it there is no CA here, and no relay starts.
    ordered = {**{name: data for name, data in files.items() if name != _ROOT}, _ROOT: files[_ROOT]}
    secret = _SECRET | {file.path for file in files_of(kinds) if file.secret}
    try:
        _write(ordered, state.root, secret)
    except BaseException:
        _take_back(ordered, state.root)
        raise
    return has_ca_key


def _write(files: Mapping[str, bytes], root: Path, secret: AbstractSet[str]) -> None:
    """Write ``files`` with the modes that a relay gives them, which shows its group what is no secret."""
    for name, data in files.items():
        path = root / name
        make_private_directory(path.parent, shown=name != MARKS)
        shown = PUBLIC if name in _PUBLIC else mode_without_secrets(path.parent)
        write_atomic(path, data, PRIVATE if name in secret else shown)


def _take_back(files: Mapping[str, bytes], root: Path) -> None:
    for name in reversed(list(files)):
        (root / name).unlink(missing_ok=True)
    for directory in {(root / name).parent for name in files} - {root}:
        with suppress(OSError):
            directory.rmdir()


_SEED_BYTES = 32


def save_for_another_relay(
    state: StateFiles,
    ca: CertificateAuthority,
    kept: KeptSettings,
    now_ms: int,
    random_bytes: Callable[[int], bytes],
    *,
    kinds: Iterable[StateKind] = KINDS,
) -> bytes:
    """Return an archive for another relay of the fleet whose first relay has ``state`` and ``kept``.

    Raises:
        AuthorityStateError: there is no CA, or the root's key is not here.
        ArchiveTooLargeError: it is too large.
        OSError: a file cannot be read.
    """
    url = kept.public_url or DEFAULT_PUBLIC_URL
    broker = broker_of_nodes(kept, url)
    settings = KeptSettings(url, None if broker is None else str(broker), tenant=kept.tenant)
    known = {name: value for name, value in asdict(settings).items() if value is not None}
    files = {_name(state, state.settings): dumps(known, indent=2).encode("utf-8")}
    for use, pair in ((RelayUse.SERVE, state.own_tls), (RelayUse.BROKER, state.broker_client_tls)):
        # What this relay does not use, that one does not either.
        if pair.certificate.exists():
            public, private = _new_key(use, random_bytes)
            certificate = issue_for_another_relay(ca, use, public, url)
            files[_name(state, pair.certificate)] = certificate.encode("ascii")
            files[_name(state, pair.key)] = private.encode("ascii")
    with ca.unchanged() as paths:
        without_keys = [path for path in paths if path.suffix != ".key"]
        copied = {file.in_directory(state.root) for file in files_of(kinds) if file.copied}
        for path in sorted({*without_keys, *copied}):
            with suppress(FileNotFoundError):
                files[_name(state, path)] = read_state(path, MAX_BYTES)
    endorsements = "".join(f"{each}\n" for each in ca.server_roots().endorsements)
    files[f"{state.ca.name}/{ENDORSEMENTS}"] = endorsements.encode("ascii")
    if (marks := snapshot(state.marks)) is not None:
        files[MARKS] = marks
    return pack(files, now_ms)


def _new_key(use: RelayUse, random_bytes: Callable[[int], bytes]) -> tuple[str, str]:
    """Return a new key for ``use``: the public one and the private one, both in PEM."""
    if use is RelayUse.SERVE:
        served = make_server_key(random_bytes)
        return public_key_pem(served.public_key()), server_key_to_pem(served)
    key = SigningKey(random_bytes(_SEED_BYTES))
    return public_key_pem(Ed25519PublicKey.from_public_bytes(bytes(key.verify_key))), private_key_to_pem(key)


def _name(state: StateFiles, path: Path) -> str:
    return str(path.relative_to(state.root))
