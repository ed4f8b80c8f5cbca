"""``relay ca backup`` and ``relay ca restore``: the relay's state as one file that is encrypted.

A backup holds all that another machine needs to replace the relay: see ``StateFiles``. The audit is not part
of it, since a relay without one begins a new chain, nor are files that a relay writes by itself. One for
another relay of the same fleet lacks the keys that issue, and the join tokens; that relay gets keys of its
own, with certificates for the names that this relay has.

A passphrase is read from a file, from EDGE_BACKUP_PASSPHRASE or from the terminal. Must not take one from the
command line, which every user of the machine can read.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Annotated, BinaryIO

import typer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from nacl.signing import SigningKey

from relay.cli.backup.archive import (
    MAX_BYTES,
    ArchiveError,
    EncryptionError,
    decrypt_for,
    decrypt_with,
    encrypt_for,
    encrypt_with,
    is_encrypted,
    pack,
    unpack,
)
from relay.cli.exits import fail
from relay.cli.options import AsJson, StateDir, answer, state_files
from relay.cli.state import authority
from relay.fleet.replay_marks import snapshot
from relay.pki.authority import CertificateAuthority
from relay.pki.relay_tls import RelayUse, issue_for_another_relay, named_by, public_key_pem
from relay.pki.roots import make_server_key, server_key_to_pem
from relay.settings.broker import broker_of_nodes
from relay.settings.config import DEFAULT_PUBLIC_URL, StateFiles
from relay.settings.environment import now_ms
from relay.settings.kept import KeptSettings, read_kept
from relay.state.kinds import KINDS, files_of
from relay.state.merging import StateKind
from schemas.error_roots import OperatorError
from schemas.files import (
    PRIVATE,
    PUBLIC,
    make_private_directory,
    mode_without_secrets,
    read_named_private,
    read_named_secret,
    read_state,
    sync_directory,
    write_atomic,
)
from schemas.keys import private_key_to_pem
from schemas.process.command_errors import EXIT_CANNOT_RUN, EXIT_USAGE
from schemas.process.state_owner import as_operator
from schemas.settings import RUN_OPTIONS_FILE, kept_run_options

_MIN_PASSPHRASE = 12
_VARIABLE = "EDGE_BACKUP_PASSPHRASE"
# The header of an encrypted file, and 16 bytes more for each 64 KiB.
_MAX_FILE_BYTES = MAX_BYTES + MAX_BYTES // 1024

PassphraseFile = Annotated[
    Path | None, typer.Option(help=f"The file that holds the passphrase. Else: {_VARIABLE}, or the terminal.")
]


def ca_backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The backup to make; it must not exist.")],
    recipient: Annotated[
        list[str] | None, typer.Option(metavar="AGE1", help="Who can restore it, as age-keygen prints it.")
    ] = None,
    passphrase_file: PassphraseFile = None,
    plain: Annotated[bool, typer.Option("--plain", help="Do not encrypt it.")] = False,
    without_ca_key: Annotated[
        bool,
        typer.Option("--without-ca-key", help="For another relay of the fleet, which has this one enrol."),
    ] = False,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Write all that another machine needs to take this relay's place into one encrypted file."""
    if (recipient is not None) + (passphrase_file is not None) + plain > 1:
        fail("--recipient, --passphrase-file and --plain exclude each other", EXIT_USAGE)
    passphrase = None if recipient or plain else _passphrase(passphrase_file, confirm=True)
    if recipient:
        encrypt_for(b"", recipient)  # before anything is issued for what it would hold
    try:
        state, ca = state_files(state_dir), authority(state_dir)
        ca.root_pem()  # without a CA, that is what is wrong, and not the file
        # Made first: where it cannot be, no certificate must be issued for what it would hold.
        with new_file(file) as written:
            if without_ca_key:
                data = save_for_another_relay(state, ca, read_kept(state.settings), now_ms(), os.urandom)
            else:
                data = save(state, ca, now_ms())
            if recipient:
                data = encrypt_for(data, recipient)
            elif passphrase is not None:
                data = encrypt_with(data, passphrase)
            written.write(data)
    except FileExistsError:
        fail(f"{file} exists, and is not overwritten: name another file", EXIT_CANNOT_RUN)
    except (ArchiveError, EncryptionError) as error:
        fail(str(error), EXIT_CANNOT_RUN)
    power = "the relay" if without_ca_key else "the relay and any node"
    warning = f" It is not encrypted: its readers can impersonate {power}." if plain else ""
    note = f"{file}: restore it with `relay ca restore`.{warning}"
    answer({"file": str(file), "encrypted": not plain}, as_json=as_json, note=note)


def ca_restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `relay ca backup` made.")],
    identity: Annotated[
        Path | None, typer.Option(help="The identity file of a recipient, as age-keygen wrote it.")
    ] = None,
    passphrase_file: PassphraseFile = None,
    plain: Annotated[bool, typer.Option("--plain", help="It is not encrypted.")] = False,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Write a backup into an empty state directory."""
    if (identity is not None) + (passphrase_file is not None) + plain > 1:
        fail("--identity, --passphrase-file and --plain exclude each other", EXIT_USAGE)
    data = read_named_private(file, _MAX_FILE_BYTES)
    if is_encrypted(data) is plain:
        # An archive that anyone can write must not be accepted as one that was encrypted.
        fail(f"{file} is {'encrypted: leave out' if plain else 'not encrypted: say'} --plain", EXIT_USAGE)
    try:
        if identity is not None:
            data = decrypt_for(data, _text_of(identity))
        elif not plain:
            data = decrypt_with(data, _passphrase(passphrase_file, confirm=False))
        state = state_files(state_dir)
        has_key = restore(data, state)
    except (ArchiveError, EncryptionError, RestoreError) as error:
        fail(f"{file}: {error}", EXIT_CANNOT_RUN)
    note = f"{state.root} holds the relay as it was. Revoke again now what was revoked since."
    if not has_key:
        note = f"{state.root} holds another relay of the fleet, without the CA's key: run it with --cluster."
    answer({"state_dir": str(state.root), "ca_key": has_key}, as_json=as_json, note=note)


def _passphrase(file: Path | None, *, confirm: bool) -> str:
    if file is not None:
        text = _text_of(file).strip("\r\n")
    elif _VARIABLE in os.environ:
        text = os.environ[_VARIABLE]
    elif sys.stdin.isatty():
        text = str(typer.prompt("Passphrase", hide_input=True, confirmation_prompt=confirm, err=True))
    else:
        fail(f"name a passphrase, in --passphrase-file or {_VARIABLE}, or an age key: see --help", EXIT_USAGE)
    if not text:
        fail("the passphrase is empty", EXIT_USAGE)
    if confirm and len(text) < _MIN_PASSPHRASE:
        fail(f"a passphrase has at least {_MIN_PASSPHRASE} characters: it guards the CA's key", EXIT_USAGE)
    return text


def _text_of(file: Path) -> str:
    try:
        return read_named_secret(file)
    except UnicodeDecodeError:
        fail(f"{file} is not text", EXIT_USAGE)


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
        *(_ENDORSEMENTS, "token.key", "settings.json", RUN_OPTIONS_FILE, MARKS),
        *("tls/server.pem", "tls/server.key", "tls/relay.pem", "tls/relay.key"),
        *("tls/cluster.pem", "tls/cluster.key"),
    }
)


_SECRET = frozenset({MARKS, *(name for name in _POSSIBLE if name.endswith(".key"))})
_PUBLIC = frozenset(
    {"settings.json", RUN_OPTIONS_FILE, *(name for name in _POSSIBLE if name.endswith(".pem"))}
)


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
    # Nothing is issued meanwhile. A join token may be spent: then the backup has that, and no certificate.
    with ca.unchanged() as paths:
        ledgers = {file.in_directory(state.root) for file in files_of(kinds)}
        own = (state.own_tls, state.broker_client_tls, state.cluster_tls)
        certificates = [path for pair in own for path in (pair.certificate, pair.key)]
        files = _read(state, {*paths, *ledgers, state.token_key, state.settings, *certificates})
    return _packed(files, state, now_ms)


def _read(state: StateFiles, paths: Iterable[Path]) -> dict[str, bytes]:
    """Return what is in those of ``paths`` that exist, by their names in an archive."""
    files: dict[str, bytes] = {}
    for path in sorted(paths):
        with suppress(FileNotFoundError):
            files[str(path.relative_to(state.root))] = read_state(path, MAX_BYTES)
    return files


def _packed(files: Mapping[str, bytes], state: StateFiles, now_ms: int) -> bytes:
    from relay.settings.table import KINDS as KNOWN  # noqa: PLC0415 - the other commands do without

    packed = dict(files)
    # The rest of that file is of this machine. Without these the manifests of the same boards are refused.
    if (known := kept_run_options(state.root).get(KNOWN.name)) is not None:
        packed[RUN_OPTIONS_FILE] = dumps({KNOWN.name: known}).encode("ascii")
    if (marks := snapshot(state.marks)) is not None:
        packed[MARKS] = marks
    return pack(packed, now_ms)


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Hold a new file that only the user who typed the command can read; it is on the disk after the block.

    If the block fails, nothing is left of it.

    Raises:
        FileExistsError: the path exists; an older backup is never overwritten.
        OSError: it cannot be written.
    """
    with as_operator():
        descriptor = os.open(path, _NEW, PRIVATE)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(descriptor)
    except BaseException as error:
        with as_operator():
            path.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
    with as_operator():
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
_TLS = {RelayUse.SERVE: "tls/server", RelayUse.BROKER: "tls/relay", RelayUse.CLUSTER: "tls/cluster"}


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
    files = {"settings.json": dumps(known, indent=2).encode("utf-8")}
    # First the certificate that names it: with the others of that name it is revoked.
    relay = named_by(_issue(ca, RelayUse.CLUSTER, url, files, random_bytes))
    for use in (RelayUse.SERVE, RelayUse.BROKER):
        # What this relay does not use, that one does not either.
        if (state.root / f"{_TLS[use]}.pem").exists():
            _issue(ca, use, url, files, random_bytes, relay)
    with ca.unchanged() as paths:  # with what was issued here
        without_keys = {path for path in paths if path.suffix != ".key"}
        copied = {file.in_directory(state.root) for file in files_of(kinds) if file.copied}
        files |= _read(state, without_keys | copied)
    endorsements = "".join(f"{each}\n" for each in ca.server_roots().endorsements)
    files[_ENDORSEMENTS] = endorsements.encode("ascii")
    return _packed(files, state, now_ms)


def _issue(
    ca: CertificateAuthority,
    use: RelayUse,
    url: str,
    files: dict[str, bytes],
    random_bytes: Callable[[int], bytes],
    relay: str | None = None,
) -> str:
    """Add to ``files`` a new key and its certificate for ``relay``; return the public key."""
    public, private = _new_key(use, random_bytes)
    certificate = issue_for_another_relay(ca, use, public, url, relay)
    files[f"{_TLS[use]}.pem"] = certificate.encode("ascii")
    files[f"{_TLS[use]}.key"] = private.encode("ascii")
    return public


def _new_key(use: RelayUse, random_bytes: Callable[[int], bytes]) -> tuple[str, str]:
    """Return a new key for ``use``: the public one and the private one, both in PEM."""
    if use is RelayUse.SERVE:
        served = make_server_key(random_bytes)
        return public_key_pem(served.public_key()), server_key_to_pem(served)
    key = SigningKey(random_bytes(_SEED_BYTES))
    return public_key_pem(Ed25519PublicKey.from_public_bytes(bytes(key.verify_key))), private_key_to_pem(key)
