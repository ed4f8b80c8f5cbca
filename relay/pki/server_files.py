"""Writes a certificate for a broker or another server, as the files that such a program reads.

| file | mode | holds |
|---|---|---|
| `server.key` | 0600 | its P-256 key; an existing one is kept |
| `server.pem` | 0644 | its certificate, by which clients verify it: of the root of servers |
| `roots.pem` | 0644 | what a broker verifies its clients by: the roots of nodes that are trusted now |

Must not decide whom the certificate is for.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

from relay.pki.authority import CertificateAuthority
from relay.pki.server_keys import make_server_key, read_server_key, server_key_to_pem
from relay.state.key_files import KeyFileError, read_key
from schemas.files import PRIVATE, make_private_directory, write_atomic

# Longer than the relay's own: an operator has to issue it again, and what a broker's key gives its thief is
# small: nodes and relay believe nothing that a broker says.
_DAYS = 397


def issue_server_files(
    ca: CertificateAuthority,
    hosts: Sequence[str],
    directory: Path,
    random_bytes: Callable[[int], bytes],
    in_directory: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Write into ``directory`` what a server needs that is reached under ``hosts``; the first is its name.

    ``in_directory`` is held while files of it are read and written: it may be of another user than the CA.

    Raises:
        AuthorityError: the CA does not issue it.
        KeyFileError: the key that is there is damaged.
        OSError: a file cannot be written, or others can read the key.
    """
    key_file = directory / "server.key"
    with in_directory():
        held = _held_key(key_file)
    key = held or make_server_key(random_bytes)
    certificate = ca.servers.issue(hosts[0].strip("[]"), hosts, key.public_key(), _DAYS)
    roots = "".join(ca.roots())
    with in_directory():
        if held is None:
            make_private_directory(directory)
            write_atomic(key_file, server_key_to_pem(key), PRIVATE)
        write_atomic(directory / "roots.pem", roots)
        write_atomic(directory / "server.pem", certificate)


def _held_key(key_file: Path) -> EllipticCurvePrivateKey | None:
    """Return the key that is there; None for one of the kind from before servers had a root of their own."""
    try:
        return read_server_key(key_file)
    except FileNotFoundError:
        return None
    except KeyFileError as error:
        try:
            read_key(key_file)
        except KeyFileError:
            raise KeyFileError(f"{error}: restore it, or remove it and another is made") from None
        return None
