"""Attacker: one who can make a token's signature fit. Tried: parts that are no JSON of one reading.

Signed rightly, so that nothing but the document is wrong. What must happen: ``malformed``, in either part and
in either class of token, and no other error.
"""

import pytest

from schemas.keys import base64url
from schemas.registry import SchemaRegistry
from schemas.tokens import AGENT_REF, DEVICE_REF, TokenError, TokenVerifier
from tests.fakes.documents import HOSTILE, NO_OBJECTS, Spoil
from tests.fakes.signer import NOW_MS, key_named

KEY = key_named("a key that the verifier holds")
PUBLIC = bytes(KEY.verify_key)
HEADER = b'{"alg":"EdDSA","kid":"%b","typ":"JWT"}' % (b"ab" * 32)
CLAIMS = b'{"iss":"a","aud":"b","sub":"c"}'
SPOILT = [
    *(pytest.param(spoil, id=name) for name, (spoil, _) in HOSTILE.items()),
    *(pytest.param(lambda _good, data=data: data, id=data.decode()) for data in NO_OBJECTS),
]


def signed(header: bytes, claims: bytes) -> str:
    signing_input = f"{base64url(header)}.{base64url(claims)}"
    return f"{signing_input}.{base64url(KEY.sign(signing_input.encode()).signature)}"


def refused(registry: SchemaRegistry, ref: str, token: str) -> str:
    verifier = TokenVerifier(registry, ref)
    with pytest.raises(TokenError) as caught:
        verifier.verify(token, lambda _kid: PUBLIC, audiences=frozenset({"b"}), now_s=NOW_MS // 1000)
    assert str(caught.value) == caught.value.reason
    return caught.value.reason


@pytest.mark.parametrize("ref", [AGENT_REF, DEVICE_REF])
@pytest.mark.parametrize("spoil", SPOILT)
def test_a_document_with_two_readings_is_no_part_of_a_token(
    registry: SchemaRegistry, ref: str, spoil: Spoil
) -> None:
    assert refused(registry, ref, signed(spoil(HEADER), CLAIMS)) == "malformed"
    assert refused(registry, ref, signed(HEADER, spoil(CLAIMS))) == "malformed"


@pytest.mark.parametrize("ref", [AGENT_REF, DEVICE_REF])
def test_without_the_damage_only_the_claims_are_wrong(registry: SchemaRegistry, ref: str) -> None:
    # Else every refusal above could be for another reason.
    assert refused(registry, ref, signed(HEADER, CLAIMS)) == "claims"
