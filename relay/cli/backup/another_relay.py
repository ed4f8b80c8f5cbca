"""Saves what another relay of the same fleet starts with: all but the keys that issue, and the join tokens.

It is an archive as ``state`` restores it. The other relay gets keys of its own, with certificates for the
names that this relay has. Must not encrypt, and must not decide where it goes.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from json import dumps
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from nacl.signing import SigningKey

from relay.cli.backup.archive import MAX_BYTES, pack
from relay.cli.backup.state import MARKS
from relay.fleet.replay_marks import snapshot
from relay.pki.authority import ENDORSEMENTS, CertificateAuthority
from relay.pki.relay_tls import RelayUse, issue_for_another_relay, public_key_pem
from relay.pki.roots import make_server_key, server_key_to_pem
from relay.settings.broker_choice import broker_of_nodes
from relay.settings.config import DEFAULT_PUBLIC_URL, StateFiles
from relay.settings.kept import KeptSettings
from relay.state.kinds import KINDS, StateKind, files_of
from schemas.files import read_state
from schemas.keys import private_key_to_pem

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
