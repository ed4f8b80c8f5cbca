"""A certificate for a broker or another server, as the files that such a program reads.

| file | mode | holds |
|---|---|---|
| `server.key` | 0600 | its key; one that is there is kept |
| `server.pem` | 0644 | its certificate |
| `roots.pem` | 0644 | the roots that are trusted now |

Must not decide whom the certificate is for.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from nacl.signing import SigningKey

from relay.pki.authority import AuthorityError, CertificateAuthority
from schemas.files import PRIVATE, make_private_directory, read_private, write_atomic
from schemas.keys import private_key_from_pem, private_key_to_pem

_SEED_BYTES = 32


def issue_server_files(
    ca: CertificateAuthority, hosts: Sequence[str], directory: Path, random_bytes: Callable[[int], bytes]
) -> None:
    """Write into ``directory`` what a server needs that is reached under ``hosts``; the first is its name.

    Raises:
        AuthorityError: the CA does not issue it, or the key that is there is damaged.
        OSError: a file cannot be written, or others can read the key.
    """
    make_private_directory(directory)
    key_file = directory / "server.key"
    try:
        key = private_key_from_pem(read_private(key_file))
    except FileNotFoundError:
        key = SigningKey(random_bytes(_SEED_BYTES))
        write_atomic(key_file, private_key_to_pem(key), PRIVATE)
    except ValueError:
        raise AuthorityError(f"{key_file} is damaged: remove it, and another is made") from None
    certificate = ca.issue_server(hosts[0].strip("[]"), hosts, bytes(key.verify_key))
    write_atomic(directory / "roots.pem", "".join(ca.roots()))
    write_atomic(directory / "server.pem", certificate)
