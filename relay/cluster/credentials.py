"""What a relay shows to NATS: a certificate and its key, or the seed of an nkey, in one private file.

Must not put a byte of a secret into an error.
"""

import ssl
from dataclasses import dataclass, field

import nkeys  # type: ignore[import-untyped]

from relay.config import ClusterConfig
from schemas.error_roots import OperatorError
from schemas.files import read_named, read_named_secret
from schemas.identity import MAX_PEM_BYTES
from schemas.tls import client_context

_CERTIFICATE = "-----BEGIN CERTIFICATE-----"
_USER_SEED = "SU"  # the seed of a user's key, as nkeys spell it


class CredentialsError(OperatorError):
    """The file holds neither a certificate with its key, nor the seed of a user's nkey."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """What is shown to each server.

    Attributes:
        seed: of the nkey; None where the certificate says who this is.
        tls: None where the connection stays on this machine and has no TLS.
    """

    seed: str | None = field(repr=False)
    tls: ssl.SSLContext | None


def read_credentials(config: ClusterConfig) -> Credentials:
    """Return what ``config`` names.

    Raises:
        CredentialsError: the file holds no credentials.
        OSError: a file cannot be used, or others can read the credentials.
    """
    text = read_named_secret(config.credentials)
    roots = None if config.root is None else read_named(config.root, MAX_PEM_BYTES).decode("ascii", "replace")
    if _CERTIFICATE in text:
        return Credentials(None, client_context(roots, (config.credentials, config.credentials)))
    seed = text.strip()
    if not _is_user_seed(seed):
        raise CredentialsError(
            f"{config.credentials} holds neither a certificate with its key nor the seed of a user's nkey"
        )
    return Credentials(seed, client_context(roots) if config.uses_tls else None)


def _is_user_seed(text: str) -> bool:
    try:
        nkeys.from_seed(bytearray(text.encode("ascii"))).wipe()
    except Exception:  # noqa: BLE001 - the library also raises what base64 and PyNaCl do; none may be shown
        return False
    return text.startswith(_USER_SEED)
