import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.canonical import blake3_hex, jcs
from schemas.keys import base64url, from_base64url, verifies
from schemas.manifest import (
    HardwareIdError,
    etag_of,
    fingerprint,
    sign_manifest,
    signature_holds,
)
from schemas.registry import SchemaRegistry
from schemas.times import FIRST_CREDIBLE_MS
from tests.fakes.signer import ECHO, METRICS, NODE_ID, NOW_MS, TTL_MS, SimulatedCa, key_named

NODE = SimulatedCa().issue()
READINGS = {"machine_id": "0123456789abcdef", "cpu_serial": "10000000abcdef01"}


def signed(**facts: Any) -> bytes:
    return sign_manifest(
        **{
            "node_id": NODE_ID,
            "kid": NODE.kid,
            "hw_fingerprint": {"algo": "blake3-256", "value": "ab" * 32, "sources": ["machine_id"]},
            "capabilities": [METRICS, ECHO],
            "issued_at_ms": NOW_MS,
            "expires_at_ms": NOW_MS + TTL_MS,
            "sign": NODE.sign,
            **facts,
        }
    )


def holds(wire: bytes, public_key: bytes = NODE.public_key) -> bool:
    return signature_holds(wire, json.loads(wire)["node_attestation"], public_key)


@pytest.mark.holds("RFC-0001/2/schema")
def test_a_signed_manifest_fits_its_document(registry: SchemaRegistry) -> None:
    registry.load("manifest@1.1.0").check(json.loads(signed()))


def test_the_wire_bytes_are_canonical() -> None:
    assert jcs(json.loads(signed())) == signed()


@pytest.mark.holds("RFC-0001/2/signature")
def test_a_second_implementation_signs_the_same_bytes() -> None:
    assert signed() == NODE.manifest()


def test_hash_and_signature_are_those_of_the_two_earlier_forms() -> None:
    final = json.loads(signed())
    attestation = final["node_attestation"]
    stated_hash, stated_sig = attestation["payload_hash"], attestation["sig"]
    attestation.update(sig="", payload_hash="")
    assert stated_hash == blake3_hex(jcs(final))
    attestation.update(payload_hash=stated_hash)
    assert verifies(NODE.public_key, jcs(final), from_base64url(stated_sig))


@pytest.mark.holds("RFC-0001/1/etag")
def test_the_etag_is_the_hash_of_the_wire_bytes() -> None:
    assert etag_of(b"") == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    assert etag_of(signed()) == blake3_hex(signed())
    assert etag_of(signed()) != etag_of(signed(issued_at_ms=NOW_MS + 1))


def test_signing_changes_nothing_that_it_was_given() -> None:
    capability = {**ECHO}
    hardware = fingerprint(READINGS)
    signed(capabilities=[capability], hw_fingerprint=hardware)
    assert capability == ECHO
    assert hardware == fingerprint(READINGS)


@given(
    issued_at_ms=st.integers(1_700_000_000_000, 2**53 - 1),
    capabilities=st.lists(st.sampled_from([ECHO, METRICS]), min_size=1, max_size=20),
)
def test_the_signature_of_whatever_was_signed_holds(issued_at_ms: int, capabilities: list[Any]) -> None:
    assert holds(signed(issued_at_ms=issued_at_ms, capabilities=capabilities))


def test_the_signature_holds_under_no_other_key() -> None:
    assert holds(signed())
    assert not holds(signed(), key_named("another").verify_key.encode())


def resigned_over(**changes: object) -> bytes:
    """Return a manifest that is changed after the hash was taken and then signed again."""
    document = json.loads(signed())
    document.update(changes)
    document["node_attestation"]["sig"] = ""
    document["node_attestation"]["sig"] = base64url(NODE.sign(jcs(document)))
    return jcs(document)


def with_last_character_respelt(wire: bytes) -> bytes:
    attestation = json.loads(wire)["node_attestation"]
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    sig = attestation["sig"]
    # 86 characters carry 516 bits, the signature has 512: four spellings of the last character.
    respelt = sig[:-1] + alphabet[alphabet.index(sig[-1]) ^ 1]
    return wire.replace(sig.encode(), respelt.encode())


@pytest.mark.parametrize(
    "wire",
    [
        pytest.param(NODE.manifest(signer=key_named("another")), id="signed-with-another-key"),
        pytest.param(
            NODE.manifest(attestation={"payload_hash": "00" * 32}), id="a-wrong-hash-rightly-signed"
        ),
        pytest.param(resigned_over(issued_at_ms=NOW_MS + 1), id="changed-after-hashing"),
        pytest.param(
            NODE.manifest(attestation={"sig": "A" * 86}), id="a-signature-of-zeros-over-the-right-hash"
        ),
        pytest.param(
            NODE.manifest(attestation={"sig": base64url(NODE.sign(b"another message"))}),
            id="the-signature-of-another-message",
        ),
        pytest.param(NODE.manifest(attestation={"sig": ""}), id="an-empty-signature"),
        pytest.param(with_last_character_respelt(NODE.manifest()), id="a-second-spelling-of-the-signature"),
        pytest.param(
            NODE.manifest().replace(str(NOW_MS).encode(), str(NOW_MS + 1).encode()), id="a-later-issue-time"
        ),
        pytest.param(NODE.manifest().replace(b"read_only", b"reversible"), id="another-safety-class"),
        pytest.param(NODE.manifest().replace(NODE.kid.encode(), b"00" * 32), id="another-kid"),
    ],
)
def test_a_manifest_that_its_key_did_not_sign_as_it_stands_does_not_hold(wire: bytes) -> None:
    assert not holds(wire)


def test_an_attestation_that_is_not_in_the_bytes_does_not_hold() -> None:
    attestation = json.loads(signed(issued_at_ms=NOW_MS + 1))["node_attestation"]
    assert not signature_holds(signed(), attestation, NODE.public_key)


def test_an_attestation_that_stands_twice_in_the_bytes_does_not_hold() -> None:
    wire = signed()
    attestation = json.loads(wire)["node_attestation"]
    assert signature_holds(wire, attestation, NODE.public_key)
    assert not signature_holds(wire + wire, attestation, NODE.public_key)


def test_the_first_credible_time_is_the_first_that_the_document_takes(registry: SchemaRegistry) -> None:
    schema = registry.load("manifest@1.1.0")
    assert schema.is_valid(json.loads(signed(issued_at_ms=FIRST_CREDIBLE_MS)))
    assert not schema.is_valid(json.loads(signed(issued_at_ms=FIRST_CREDIBLE_MS - 1)))


@pytest.mark.holds("RFC-0001/2/hw-fingerprint")
def test_a_fingerprint_is_the_hash_of_what_could_be_read(registry: SchemaRegistry) -> None:
    expected = blake3_hex(b'{"cpu_serial":"10000000abcdef01","machine_id":"0123456789abcdef"}')
    made = fingerprint(READINGS)
    assert made == {"algo": "blake3-256", "value": expected, "sources": ["cpu_serial", "machine_id"]}
    registry.load("manifest@1.1.0").check({**json.loads(signed()), "hw_fingerprint": made})


@pytest.mark.holds("RFC-0001/2/hw-fingerprint")
def test_a_fingerprint_does_not_depend_on_the_order_of_reading_and_holds_no_value() -> None:
    assert fingerprint(dict(reversed(READINGS.items()))) == fingerprint(READINGS)
    assert not any(value in str(fingerprint(READINGS)) for value in READINGS.values())


def test_a_fingerprint_changes_with_each_reading() -> None:
    for source in READINGS:
        assert fingerprint({**READINGS, source: "x"})["value"] != fingerprint(READINGS)["value"]


def test_a_fingerprint_of_nothing_is_refused() -> None:
    with pytest.raises(HardwareIdError, match="no hardware id could be read: run `systemd-machine-id-setup`"):
        fingerprint({})
