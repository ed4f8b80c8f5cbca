"""Encrypts backups in the age format (age-encryption.org/v1), for recipients or with a passphrase.

The one module that imports the library, and only for a backup: the help of the commands is shown without it,
where the extra ``[client]`` alone is installed. Must not read a secret from a file, nor log or repeat one.
"""

from collections.abc import Sequence
from typing import Any

from schemas.error_roots import CommandLineError, OperatorError

_HEADER = b"age-encryption.org/v1\n"
_MEASUREMENTS = 5
_TOO_MUCH_WORK = "Excessive work"


class EncryptionError(OperatorError):
    """A backup cannot be encrypted or decrypted with this; the text says why."""


def _library() -> Any:
    import pyrage  # type: ignore[import-untyped]  # noqa: PLC0415 - see above; the library brings no types

    return pyrage


def is_encrypted(data: bytes) -> bool:
    """Return whether ``data`` begins as a file of the age format does."""
    return data.startswith(_HEADER)


def encrypt_for(data: bytes, recipients: Sequence[str]) -> bytes:
    """Return ``data`` encrypted for the identities of ``recipients`` (``age1…``); any one can decrypt it.

    Raises:
        CommandLineError: one of them is not a recipient.
    """
    pyrage = _library()
    try:
        keys = [pyrage.x25519.Recipient.from_str(each) for each in recipients]
    except pyrage.RecipientError:
        raise CommandLineError("a recipient is not of the form age1…, as `age-keygen -y` prints it") from None
    return bytes(pyrage.encrypt(data, keys))


def encrypt_with(data: bytes, passphrase: str) -> bytes:
    """Return ``data`` encrypted with ``passphrase``."""
    return bytes(_library().passphrase.encrypt(data, passphrase))


def decrypt_for(data: bytes, identities: str) -> bytes:
    """Return what was encrypted for one of ``identities``, the text of a file that age-keygen wrote.

    Raises:
        EncryptionError: that is no identity file, or ``data`` is damaged or not for any of them.
    """
    pyrage = _library()
    lines = [line.strip() for line in identities.splitlines()]
    try:
        keys = [pyrage.x25519.Identity.from_str(line) for line in lines if line and not line.startswith("#")]
    except pyrage.IdentityError:
        # Without the library's text, which might repeat a secret.
        raise EncryptionError("the identity file is not of the form that age-keygen writes") from None
    try:
        return bytes(pyrage.decrypt(data, keys))
    except pyrage.DecryptError:
        raise EncryptionError("the backup is not for this identity, or it is damaged") from None


def decrypt_with(data: bytes, passphrase: str) -> bytes:
    """Return what was encrypted with ``passphrase``.

    The library refuses to derive a key that takes longer than a multiple of what this machine should take. It
    measures for milliseconds: a machine that is busy in that moment is measured again.

    Raises:
        EncryptionError: it was another passphrase, or none; ``data`` is damaged; or the machine is too slow.
    """
    pyrage = _library()
    for _ in range(_MEASUREMENTS):
        try:
            return bytes(pyrage.passphrase.decrypt(data, passphrase))
        except pyrage.DecryptError as error:
            if not str(error).startswith(_TOO_MUCH_WORK):
                raise EncryptionError("the passphrase is another one, or the backup is damaged") from None
    raise EncryptionError(
        "this machine is too busy or too slow to derive the key from the passphrase: try again later, or "
        "decrypt the backup elsewhere with `age --decrypt`, and restore what that writes"
    )
