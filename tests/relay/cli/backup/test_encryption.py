import base64

import pyrage  # type: ignore[import-untyped]  # the library brings no types
import pytest

from relay.cli.backup.encryption import (
    EncryptionError,
    decrypt_for,
    decrypt_with,
    encrypt_for,
    encrypt_with,
    is_encrypted,
)
from schemas.error_roots import CommandLineError

SECRET = b"the root's key"
ONE, TWO, OTHER = (pyrage.x25519.Identity.generate() for _ in range(3))
# Of the age format, with a work factor of 2: the library reads it, and writes only what takes seconds.
WITH_PASSPHRASE = base64.b64decode(
    "YWdlLWVuY3J5cHRpb24ub3JnL3YxCi0+IHNjcnlwdCB6OHViOXMrc3YxV0xyUi9SbXcyMElRIDIKaDBOcW54OFlqSm1pdHNVc2k2dVRZ"
    "UDRBZEMyOVVEMFU1b2s3TTZLMDdVUQotLS0gd1dtZ0Q3NGNVczY0VkJyZEo0RnFzYXh4Mm1abFhFQ0VneDZoVkFlMkl3SQrlSI3+hA4K"
    "LW3mgTn3/aUmadvIFofydTZUbYcYgmn4/djgpbtVFErGNBl4aPqI"
)
FOR_TWO = encrypt_for(SECRET, [str(ONE.to_public()), str(TWO.to_public())])


def test_each_recipient_can_read_it_and_no_other_key_can() -> None:
    assert is_encrypted(FOR_TWO)
    assert SECRET not in FOR_TWO
    for identity in (ONE, TWO):
        assert decrypt_for(FOR_TWO, f"# created by age-keygen\n\n{identity}\n") == SECRET
    with pytest.raises(EncryptionError, match="not for this identity"):
        decrypt_for(FOR_TWO, str(OTHER))


def test_an_identity_file_may_hold_several() -> None:
    assert decrypt_for(FOR_TWO, f"{OTHER}\n{TWO}\n") == SECRET


def test_what_another_program_encrypted_is_read_with_its_passphrase_and_no_other() -> None:
    assert is_encrypted(WITH_PASSPHRASE)
    assert decrypt_with(WITH_PASSPHRASE, "correct horse") == SECRET
    with pytest.raises(EncryptionError, match="passphrase"):
        decrypt_with(WITH_PASSPHRASE, "another horse")


@pytest.mark.long  # three derivations of a key at the library's own work factor
def test_a_passphrase_reads_it_and_no_other() -> None:
    data = encrypt_with(SECRET, "correct horse")
    assert is_encrypted(data)
    assert SECRET not in data
    assert decrypt_with(data, "correct horse") == SECRET
    with pytest.raises(EncryptionError, match="passphrase"):
        decrypt_with(data, "another horse")


def test_a_key_that_would_take_this_machine_hours_is_not_a_wrong_passphrase() -> None:
    hours = WITH_PASSPHRASE.replace(b" 2\n", b" 40\n", 1)
    assert hours != WITH_PASSPHRASE
    with pytest.raises(EncryptionError, match="too busy or too slow"):
        decrypt_with(hours, "correct horse")


@pytest.mark.parametrize("place", [0, 30, -1])
def test_a_changed_byte_is_found(place: int) -> None:
    data = bytearray(FOR_TWO)
    data[place] ^= 1
    with pytest.raises(EncryptionError):
        decrypt_for(bytes(data), str(ONE))


@pytest.mark.parametrize("left", [0, 21, 100, -1])
def test_what_is_cut_short_is_found(left: int) -> None:
    with pytest.raises(EncryptionError):
        decrypt_for(FOR_TWO[:left], str(ONE))


@pytest.mark.parametrize("recipient", ["", "age1", "nonsense", "AGE-SECRET-KEY-1"])
def test_what_is_no_recipient_is_refused(recipient: str) -> None:
    with pytest.raises(CommandLineError, match="age1"):
        encrypt_for(SECRET, [str(ONE.to_public()), recipient])


@pytest.mark.parametrize("text", ["", "# only a comment\n", "a secret that is no identity\n"])
def test_what_is_no_identity_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(EncryptionError) as caught:
        decrypt_for(FOR_TWO, text)
    assert "a secret" not in str(caught.value)
