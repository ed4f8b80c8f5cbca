import base64

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from schemas.certificates import moment, name_of
from schemas.endorsement import endorse, is_endorsed
from schemas.identity import first_certificate_in
from tests.fakes.signer import DAY_MS, NOW_MS, SimulatedCa

OLD, NEW, OTHER = SimulatedCa("old"), SimulatedCa("new"), SimulatedCa("other")


def der(ca: SimulatedCa) -> bytes:
    return first_certificate_in(ca.root_pem)


def test_an_endorsement_is_a_signature_of_the_old_key_over_the_new_root() -> None:
    text = endorse(OLD.key, NEW.root_pem)
    signature = base64.urlsafe_b64decode(text + "==")
    assert OLD.key.verify_key.verify(b"edge-kubelet root\n" + der(NEW), signature)
    assert len(text) == 86


def test_one_of_those_that_are_trusted_is_enough() -> None:
    endorsement = endorse(OLD.key, NEW.root_pem)
    for trusted in ([OLD], [OTHER, OLD], [OLD, OTHER]):
        assert is_endorsed(der(NEW), map(der, trusted), endorsement)


@pytest.mark.parametrize("trusted", [[], [OTHER], [NEW]], ids=["none", "another", "itself"])
def test_a_root_that_is_not_trusted_endorses_nothing(trusted: list[SimulatedCa]) -> None:
    assert not is_endorsed(der(NEW), map(der, trusted), endorse(OLD.key, NEW.root_pem))


def test_an_endorsement_is_for_one_root() -> None:
    assert not is_endorsed(der(OTHER), [der(OLD)], endorse(OLD.key, NEW.root_pem))


def test_what_the_old_root_signed_otherwise_is_no_endorsement() -> None:
    plain = base64.urlsafe_b64encode(OLD.key.sign(der(NEW)).signature).rstrip(b"=").decode()
    assert not is_endorsed(der(NEW), [der(OLD)], plain)


@pytest.mark.parametrize("text", ["", "A", "A" * 86, "=" * 86, "\ud800" * 86, "\x1b[31m"])
def test_what_is_no_signature_endorses_nothing(text: str) -> None:
    assert not is_endorsed(der(NEW), [der(OLD)], text)


def test_a_root_of_another_kind_endorses_nothing_and_does_no_harm() -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    builder = x509.CertificateBuilder(name_of("ec"), name_of("ec"), key.public_key(), 5)
    builder = builder.not_valid_before(moment(NOW_MS)).not_valid_after(moment(NOW_MS + DAY_MS))
    strange = builder.sign(key, hashes.SHA256()).public_bytes(Encoding.DER)
    endorsement = endorse(OLD.key, NEW.root_pem)
    assert not is_endorsed(der(NEW), [strange, b"no certificate"], endorsement)
    assert is_endorsed(der(NEW), [strange, b"", der(OLD)], endorsement)
