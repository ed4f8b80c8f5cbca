"""Writes a certificate for a broker or another server, as the files that such a program reads.

| file | mode | holds |
|---|---|---|
| `server.key` | 0600 | its key; an existing one is kept |
| `server.pem` | 0644 | its certificate |
| `roots.pem` | 0644 | the roots that are trusted now |

Must not decide whom the certificate is for.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from relay.key_files import load_or_create_key
from relay.pki.authority import CertificateAuthority
from schemas.files import write_atomic


def issue_server_files(
    ca: CertificateAuthority, hosts: Sequence[str], directory: Path, random_bytes: Callable[[int], bytes]
) -> None:
    """Write into ``directory`` what a server needs that is reached under ``hosts``; the first is its name.

    Raises:
        AuthorityError: the CA does not issue it.
        KeyFileError: the key that is there is damaged.
        OSError: a file cannot be written, or others can read the key.
    """
    key = load_or_create_key(directory / "server.key", random_bytes)
    certificate = ca.issue_server(hosts[0].strip("[]"), hosts, bytes(key.verify_key))
    write_atomic(directory / "roots.pem", "".join(ca.roots()))
    write_atomic(directory / "server.pem", certificate)
