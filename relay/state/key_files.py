"""Private keys of the relay's own as files: read, or made on first use. Mode 0600, PEM.

Must not know what a key is for, and must not put a byte of one into an error.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from nacl.signing import SigningKey

from schemas.error_roots import StateError
from schemas.files import PRIVATE, make_private_directory, read_private, write_atomic
from schemas.keys import KeyFormatError, private_key_from_pem, private_key_to_pem

_SEED_BYTES = 32

KeyT = TypeVar("KeyT")


class KeyFileError(StateError):
    """The file holds no key."""


def read_key(path: Path) -> SigningKey:
    """Return the key in ``path``.

    Raises:
        FileNotFoundError: there is none.
        KeyFileError: the file is damaged.
        ExposedFileError: others can read it.
    """
    try:
        return private_key_from_pem(read_private(path))
    except (KeyFormatError, UnicodeDecodeError):
        # Without the error's own text, which can show a byte of the key.
        raise KeyFileError(f"{path} is damaged: it holds no key") from None


def load_or_create_key(path: Path, random_bytes: Callable[[int], bytes]) -> SigningKey:
    """Return the key in ``path``, made on first use, as ``load_or_create`` does."""
    return load_or_create(path, read_key, lambda: SigningKey(random_bytes(_SEED_BYTES)), private_key_to_pem)


def load_or_create(
    path: Path, read: Callable[[Path], KeyT], make: Callable[[], KeyT], to_pem: Callable[[KeyT], str]
) -> KeyT:
    """Return the key that ``read`` finds in ``path``, made on first use, together with its directory.

    Raises:
        KeyFileError: the file is damaged. It is not overwritten: the key may be in a backup.
        OSError: it cannot be read or written, or others can read it.
    """
    try:
        return read(path)
    except KeyFileError as error:
        raise KeyFileError(f"{error}: restore it, or remove it and another is made") from None
    except FileNotFoundError:
        make_private_directory(path.parent, shown=True)
        key = make()
        write_atomic(path, to_pem(key), PRIVATE)
        return key
