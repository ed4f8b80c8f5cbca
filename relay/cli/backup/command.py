"""``relay ca backup`` and ``relay ca restore``: the relay's state as one file that is encrypted.

A passphrase is read from a file, from EDGE_BACKUP_PASSPHRASE or from the terminal. Must not take one from the
command line, which every user of the machine can read.
"""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from relay.cli.backup.archive import (
    MAX_BYTES,
    ArchiveError,
    EncryptionError,
    decrypt_for,
    decrypt_with,
    encrypt_for,
    encrypt_with,
    is_encrypted,
)
from relay.cli.backup.state import RestoreError, restore, save, save_for_another_relay, write_new
from relay.cli.exits import fail
from relay.cli.options import AsJson, StateDir, answer, state_files
from relay.cli.state import authority
from relay.settings.environment import now_ms
from relay.settings.kept import read_kept
from schemas.files import read_named_private, read_named_secret
from schemas.process.command_errors import EXIT_CANNOT_RUN, EXIT_USAGE
from schemas.process.state_owner import as_operator

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
    try:
        state, ca = state_files(state_dir), authority(state_dir)
        if without_ca_key:
            data = save_for_another_relay(state, ca, read_kept(state.settings), now_ms(), os.urandom)
        else:
            data = save(state, ca, now_ms())
        if recipient:
            data = encrypt_for(data, recipient)
        elif passphrase is not None:
            data = encrypt_with(data, passphrase)
        with as_operator():
            write_new(file, data)
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
        note = (
            f"{state.root} holds a further relay of the fleet, without the CA's key: run it with --cluster."
        )
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
