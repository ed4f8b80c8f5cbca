"""What a relay shows to NATS: a certificate and its key, or the seed of an nkey, in one private file.

And what it proves to the other relays with which one it is: another certificate, of the fleet's CA.

Must not put a byte of a secret into an error.
"""

import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from pathlib import Path

import nkeys  # type: ignore[import-untyped]
from attrs import define, field

from relay.cluster.channel import RelayKey
from relay.settings.config import ClusterConfig, TlsFiles
from relay.settings.table import CLUSTER_CREDENTIALS, CLUSTER_ROOT
from relay.state.key_files import KeyFileError, read_key
from schemas.certificates import relay_name
from schemas.error_roots import OperatorError
from schemas.files import os_error_text, read_named, read_named_secret, read_state
from schemas.identity import MAX_PEM_BYTES, CertificateFormatError, first_certificate_in
from schemas.settings import Setting
from schemas.tls import TlsFilesError, client_context, load_chain

_SEED_BYTES = 32
_CERTIFICATE = "-----BEGIN CERTIFICATE-----"
_USER_SEED = "SU"  # the seed of a user's key, as nkeys spell it


class CredentialsError(OperatorError):
    """A file cannot be used; the text names the option that has named it."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """What is shown to each server.

    Attributes:
        seed: of the nkey; None where the certificate says who this is.
        tls: None where the connection stays on this machine and has no TLS.
    """

    seed: str | None = dataclass_field(repr=False)
    tls: ssl.SSLContext | None


def read_credentials(config: ClusterConfig) -> Credentials:
    """Return what ``config`` names.

    Raises:
        CredentialsError: a file cannot be used, or others can read the credentials.
        TlsFilesError: the roots that this machine trusts cannot be used.
    """
    file = config.credentials
    with _named(CLUSTER_CREDENTIALS):
        text = _text(file)
    with _named(CLUSTER_ROOT):
        roots = None if config.root is None else _root(config.root)
    if _CERTIFICATE in text:
        tls = client_context(roots)
        with _named(CLUSTER_CREDENTIALS):
            load_chain(tls, file, file)
        return Credentials(None, tls)
    seed = text.strip()
    if not _is_user_seed(seed):
        raise _unusable(
            CLUSTER_CREDENTIALS,
            f"{file} holds neither a certificate with its key nor the seed of a user's nkey",
        )
    return Credentials(seed, client_context(roots) if config.uses_tls else None)


@contextmanager
def _named(setting: Setting[Path]) -> Iterator[None]:
    """Have an error of reading a file name the option that has named the file."""
    try:
        yield
    except OSError as error:
        raise _unusable(setting, os_error_text(error)) from None


def _unusable(setting: Setting[Path], reason: str) -> CredentialsError:
    return CredentialsError(f"{setting.flag}: {reason}")


def _text(file: Path) -> str:
    try:
        return read_named_secret(file)
    except UnicodeDecodeError:
        return ""  # as of any file without credentials; the error has bytes of it


def _root(file: Path) -> str:
    text = read_named(file, MAX_PEM_BYTES).decode("ascii", "replace")
    try:
        client_context(text)
    except TlsFilesError:
        raise TlsFilesError(f"{file} holds no certificate in PEM: name the root of the servers") from None
    return text


def _is_user_seed(text: str) -> bool:
    try:
        nkeys.from_seed(bytearray(text.encode("ascii"))).wipe()
    except Exception:  # noqa: BLE001 - the library also raises what base64 and PyNaCl do; none may be shown
        return False
    return text.startswith(_USER_SEED)


def new_nkey(random_bytes: Callable[[int], bytes]) -> tuple[str, str]:
    """Return the seed of a new nkey of a user, and its public key."""
    seed = nkeys.encode_seed(random_bytes(_SEED_BYTES), nkeys.PREFIX_BYTE_USER)
    pair = nkeys.from_seed(bytearray(seed))
    public = pair.public_key.decode("ascii")
    pair.wipe()
    return seed.decode("ascii"), public


@define(eq=False, repr=False)
class RelayKeyFile:
    """The certificate by which the other relays know this one, and its key, in ``files``: they may change."""

    _files: TlsFiles
    _read_at: tuple[int, int] = field(init=False, default=(0, 0))
    _key: RelayKey | None = field(init=False, default=None)

    def read(self) -> RelayKey | None:
        """Return both; None if there is no certificate.

        Raises:
            StateError, OSError: a file is damaged, or others can read the key.
        """
        try:
            stamp = (self._files.certificate.stat().st_mtime_ns, self._files.key.stat().st_mtime_ns)
            if stamp != self._read_at:
                pem = read_state(self._files.certificate).decode("ascii", "replace")
                self._key = RelayKey(first_certificate_in(pem), read_key(self._files.key))
                self._read_at = stamp
        except FileNotFoundError:
            return None
        except CertificateFormatError:
            raise KeyFileError(f"{self._files.certificate} is damaged: it holds no certificate") from None
        return self._key

    def name(self) -> str:
        """Return what the others call this relay; empty if it has no certificate. Raises as ``read``."""
        key = self.read()
        return "" if key is None else relay_name(bytes(key.key.verify_key))
