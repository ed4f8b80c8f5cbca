import base64
import json
from collections.abc import Callable
from typing import Any

import pytest

from schemas.keys import base64url
from schemas.registry import SchemaRegistry
from schemas.tokens import (
    AGENT_REF,
    DEVICE_REF,
    EXTERNAL_AGENT_REF,
    EXTERNAL_HEADER_REF,
    TokenError,
    TokenVerifier,
    sign_token,
)
from tests.fakes.signer import ABSENT, LOW_ORDER_KEYS, NODE_ID, NOW_MS, key_named

NOW_S = NOW_MS // 1000
AUDIENCE = "https://relay.example/mcp"
KEY = key_named("issuer")
KID = "key-1"
LEEWAY_S = 5
LIMIT = 4096
CLAIMS: dict[str, Any] = {
    "iss": "https://relay.example",
    "aud": AUDIENCE,
    "sub": "agent-7",
    "tenant": "acme",
    "scope": "tools:call:read_only tools:call:reversible",
    "iat": NOW_S,
    "exp": NOW_S + 600,
    "jti": "jti-1",
    "token_class": "agent_runtime",
}
DEVICE_CLAIMS: dict[str, Any] = {
    "iss": NODE_ID,
    "sub": NODE_ID,
    "aud": AUDIENCE,
    "nonce": "n" * 43,
    "iat": NOW_S,
    "exp": NOW_S + 60,
    "jti": "jti-1",
    "scope": "device:connect",
    "token_class": "device_runtime",
}
HEADER = {"alg": "EdDSA", "kid": KID, "typ": "JWT"}


@pytest.fixture(scope="module")
def agents(registry: SchemaRegistry) -> TokenVerifier:
    return TokenVerifier(registry, AGENT_REF)


def key_of(kid: str) -> bytes | None:
    return bytes(KEY.verify_key) if kid == KID else None


def claims(**changes: object) -> dict[str, Any]:
    return {name: value for name, value in {**CLAIMS, **changes}.items() if value is not ABSENT}


def token(**changes: object) -> str:
    return sign_token(KEY, KID, claims(**changes))


def signed_parts(header: object, body: object) -> str:
    """Return a token of any header and claims, given as values or as raw text, with a good signature."""
    raw = [part if isinstance(part, str) else base64url(json.dumps(part).encode()) for part in (header, body)]
    signing_input = ".".join(raw)
    return f"{signing_input}.{base64url(KEY.sign(signing_input.encode()).signature)}"


def encoded(text: str) -> str:
    return base64url(text.encode())


def verify(
    verifier: TokenVerifier,
    text: str,
    keys: Callable[[str], bytes | None] = key_of,
    *,
    audience: str = AUDIENCE,
    now_s: int = NOW_S,
) -> dict[str, Any]:
    return verifier.verify(text, keys, audiences=frozenset({audience}), now_s=now_s)


def test_a_good_token_gives_its_claims(agents: TokenVerifier) -> None:
    assert verify(agents, token()) == CLAIMS


def test_a_device_token_gives_its_claims(registry: SchemaRegistry) -> None:
    text = sign_token(KEY, KID, DEVICE_CLAIMS)
    assert verify(TokenVerifier(registry, DEVICE_REF), text) == DEVICE_CLAIMS


def test_a_token_is_a_compact_jws() -> None:
    header, body, signature = (
        base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)) for part in token().split(".")
    )
    assert json.loads(header) == HEADER
    assert json.loads(body) == CLAIMS
    assert len(signature) == 64


@pytest.mark.parametrize("verifying", [AGENT_REF, DEVICE_REF])
def test_a_token_of_one_class_is_not_taken_for_the_other(registry: SchemaRegistry, verifying: str) -> None:
    other = DEVICE_CLAIMS if verifying == AGENT_REF else CLAIMS
    with pytest.raises(TokenError, match="claims"):
        verify(TokenVerifier(registry, verifying), sign_token(KEY, KID, other))


GOOD = token()
GOOD_HEADER, GOOD_BODY, GOOD_SIGNATURE = GOOD.split(".")
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"

BAD_TOKENS: dict[str, tuple[str, str]] = {
    "nothing": ("", "malformed"),
    "two-parts": (f"{GOOD_HEADER}.{GOOD_BODY}", "malformed"),
    "four-parts": (f"{GOOD}.{GOOD_SIGNATURE}", "malformed"),
    "five-parts-as-if-encrypted": ("a.b.c.d.e", "malformed"),
    "too-long": (f"{GOOD_HEADER}.{'A' * LIMIT}.{GOOD_SIGNATURE}", "malformed"),
    "padding": (f"{GOOD_HEADER}=.{GOOD_BODY}.{GOOD_SIGNATURE}", "malformed"),
    "a-line-feed-at-the-end": (f"{GOOD}\n", "malformed"),
    "a-space-in-front": (f" {GOOD}", "malformed"),
    "a-letter-beyond-ascii-in-the-claims": (f"{GOOD_HEADER}.caf\xe9.{GOOD_SIGNATURE}", "malformed"),
    "a-surrogate-in-the-claims": (f"{GOOD_HEADER}.\udce9.{GOOD_SIGNATURE}", "malformed"),
    "a-signature-respelt": (
        GOOD[:-1] + ALPHABET[ALPHABET.index(GOOD[-1]) ^ 1],
        "malformed",
    ),
    "a-header-that-is-no-json": (signed_parts(base64url(b"{"), CLAIMS), "malformed"),
    "a-header-that-is-no-object": (signed_parts([HEADER], CLAIMS), "malformed"),
    "a-header-with-a-member-twice": (
        signed_parts(base64url(b'{"alg":"EdDSA","alg":"EdDSA","kid":"key-1"}'), CLAIMS),
        "malformed",
    ),
    "the-algorithm-none": (signed_parts({**HEADER, "alg": "none"}, CLAIMS), "malformed"),
    "a-shared-secret-algorithm": (signed_parts({**HEADER, "alg": "HS256"}, CLAIMS), "malformed"),
    "the-algorithm-in-another-case": (signed_parts({**HEADER, "alg": "eddsa"}, CLAIMS), "malformed"),
    "no-algorithm": (signed_parts({"kid": KID}, CLAIMS), "malformed"),
    "no-kid": (signed_parts({"alg": "EdDSA"}, CLAIMS), "malformed"),
    "a-kid-that-is-a-path": (signed_parts({**HEADER, "kid": "../key"}, CLAIMS), "malformed"),
    "a-key-url": (signed_parts({**HEADER, "jku": "https://a.example"}, CLAIMS), "malformed"),
    "a-key-of-its-own": (signed_parts({**HEADER, "jwk": {"kty": "OKP"}}, CLAIMS), "malformed"),
    "a-certificate-url": (signed_parts({**HEADER, "x5u": "https://a.example"}, CLAIMS), "malformed"),
    "a-critical-extension": (signed_parts({**HEADER, "crit": ["b64"], "b64": False}, CLAIMS), "malformed"),
    "claims-that-are-no-json": (signed_parts(HEADER, base64url(b"claims")), "malformed"),
    "claims-that-are-no-object": (signed_parts(HEADER, "MQ"), "malformed"),
    "claims-with-a-member-twice": (
        signed_parts(HEADER, base64url(b'{"tenant":"a","tenant":"b"}')),
        "malformed",
    ),
    "an-unknown-kid": (signed_parts({**HEADER, "kid": "key-2"}, CLAIMS), "unknown_key"),
    "signed-with-another-key": (sign_token(key_named("another"), KID, CLAIMS), "signature"),
    "an-empty-signature": (f"{GOOD_HEADER}.{GOOD_BODY}.", "signature"),
    "claims-replaced": (f"{GOOD_HEADER}.{token(tenant='other').split('.')[1]}.{GOOD_SIGNATURE}", "signature"),
    "header-replaced": (
        f"{base64url(json.dumps({**HEADER, 'typ': 'jwt'}).encode())}.{GOOD_BODY}.{GOOD_SIGNATURE}",
        "signature",
    ),
    "an-invented-claim": (token(admin=True), "claims"),
    "an-audience-list": (token(aud=[AUDIENCE]), "claims"),
    "a-scope-list": (token(scope=["tools:call:read_only"]), "claims"),
    "a-scope-with-two-spaces": (token(scope="a:b  c:d"), "claims"),
    "a-tenant-in-upper-case": (token(tenant="Acme"), "claims"),
    "an-expiry-as-text": (token(exp=str(NOW_S + 600)), "claims"),
    "an-expiry-with-a-fraction": (token(exp=NOW_S + 0.5), "claims"),
    "a-negative-time": (token(iat=-1), "claims"),
    "another-token-class": (token(token_class="device_runtime"), "claims"),
    **{f"without-{name}": (token(**{name: ABSENT}), "claims") for name in CLAIMS},
    "another-audience": (token(aud="https://relay.example"), "audience"),
    "expired-beyond-the-leeway": (token(iat=NOW_S - 60, exp=NOW_S - LEEWAY_S), "expired"),
    "issued-in-the-future": (token(iat=NOW_S + LEEWAY_S + 1), "not_yet"),
    "expiring-before-it-is-issued": (token(iat=NOW_S + 2, exp=NOW_S + 1), "not_yet"),
    "expiring-as-it-is-issued": (token(iat=NOW_S, exp=NOW_S), "not_yet"),
}


@pytest.mark.parametrize(("text", "reason"), BAD_TOKENS.values(), ids=BAD_TOKENS)
def test_a_bad_token_is_refused_with_a_fixed_word(agents: TokenVerifier, text: str, reason: str) -> None:
    with pytest.raises(TokenError) as caught:
        verify(agents, text)
    assert caught.value.reason == str(caught.value) == reason
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None or caught.value.__suppress_context__


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"iat": NOW_S - 60, "exp": NOW_S - LEEWAY_S + 1}, id="expired-within-the-leeway"),
        pytest.param({"iat": NOW_S + LEEWAY_S}, id="issued-ahead-within-the-leeway"),
        pytest.param({"scope": "tools:call:read_only"}, id="one-scope"),
    ],
)
def test_clocks_may_differ_by_the_leeway(agents: TokenVerifier, changes: dict[str, Any]) -> None:
    assert verify(agents, token(**changes)) == claims(**changes)


def test_a_token_of_the_limit_is_read_and_a_longer_one_is_not(agents: TokenVerifier) -> None:
    claims_text = json.dumps(CLAIMS)
    spaces = next(
        n for n in range(LIMIT) if len(signed_parts(HEADER, encoded(claims_text + " " * n))) == LIMIT
    )
    assert verify(agents, signed_parts(HEADER, encoded(claims_text + " " * spaces))) == CLAIMS
    with pytest.raises(TokenError, match="malformed"):
        verify(agents, signed_parts(HEADER, encoded(claims_text + " " * (spaces + 1))))


@pytest.mark.parametrize(
    "header",
    [
        pytest.param({"alg": "EdDSA", "kid": KID}, id="no-type"),
        pytest.param({"typ": "jwt", "kid": KID, "alg": "EdDSA"}, id="the-type-in-lower-case"),
    ],
)
def test_a_header_may_leave_the_type_out_or_write_it_small(
    agents: TokenVerifier, header: dict[str, str]
) -> None:
    assert verify(agents, signed_parts(header, CLAIMS)) == CLAIMS


def test_no_key_is_asked_for_before_the_header_is_known_to_be_good(agents: TokenVerifier) -> None:
    asked: list[str] = []

    def asking(kid: str) -> bytes | None:
        asked.append(kid)
        return key_of(kid)

    with pytest.raises(TokenError):
        verify(agents, signed_parts({**HEADER, "alg": "none"}, CLAIMS), asking)
    assert asked == []
    verify(agents, GOOD, asking)
    assert asked == [KID]


@pytest.mark.parametrize("low", LOW_ORDER_KEYS.values(), ids=LOW_ORDER_KEYS)
def test_a_key_of_low_order_verifies_nothing(agents: TokenVerifier, low: bytes) -> None:
    forged = f"{GOOD_HEADER}.{GOOD_BODY}.AQ{'A' * 84}"
    with pytest.raises(TokenError, match="signature"):
        verify(agents, forged, lambda _kid: low)


def test_no_token_with_a_character_changed_is_accepted(agents: TokenVerifier) -> None:
    for index, character in enumerate(GOOD):
        if character == ".":
            continue
        changed = GOOD[:index] + ALPHABET[ALPHABET.index(character) ^ 1] + GOOD[index + 1 :]
        with pytest.raises(TokenError):
            verify(agents, changed)


# --- tokens of outside issuers ------------------------------------------------------------------------

OUTSIDE_HEADER = {"alg": "EdDSA", "kid": "signing/1:a=", "typ": "at+jwt"}
OUTSIDE_CLAIMS: dict[str, Any] = {**CLAIMS, "iss": "https://issuer.example", "azp": "client", "amr": ["pwd"]}


@pytest.fixture(scope="module")
def outside(registry: SchemaRegistry) -> TokenVerifier:
    return TokenVerifier(registry, EXTERNAL_AGENT_REF, EXTERNAL_HEADER_REF)


def outside_token(header: dict[str, Any], changes: dict[str, Any]) -> str:
    members = {name: value for name, value in {**OUTSIDE_CLAIMS, **changes}.items() if value is not ABSENT}
    head = {name: value for name, value in {**OUTSIDE_HEADER, **header}.items() if value is not ABSENT}
    return signed_parts(head, members)


def outside_key(kid: str) -> bytes | None:
    return bytes(KEY.verify_key) if kid == OUTSIDE_HEADER["kid"] else None


@pytest.mark.parametrize(
    ("header", "changes"),
    [
        pytest.param({}, {}, id="with claims of its own"),
        pytest.param({"typ": ABSENT}, {}, id="without a type"),
        pytest.param({"typ": "JWT"}, {}, id="of the plain type"),
        pytest.param({"typ": "application/at+jwt"}, {}, id="of the type in full"),
        pytest.param({"alg": "Ed25519"}, {}, id="with the algorithm's other name"),
        pytest.param({}, {"aud": [AUDIENCE]}, id="for us in a list"),
        pytest.param({}, {"aud": ["https://a.example", AUDIENCE]}, id="for us among others"),
        pytest.param({}, {"nbf": NOW_S}, id="good from now on"),
        pytest.param({}, {"nbf": NOW_S + LEEWAY_S}, id="good soon, within the leeway"),
        pytest.param({}, {"sub": "auth0|an agent"}, id="a subject of another alphabet"),
        pytest.param({}, {"sub": "x" * 255}, id="a long subject"),
        pytest.param({}, {"jti": "a/b+c=:" + "x" * 121}, id="a jti of another alphabet"),
        pytest.param({}, {"scope": "openid https://a.example/x"}, id="other scopes"),
    ],
)
def test_a_token_of_an_outside_issuer_is_read_as_such_issuers_write_them(
    outside: TokenVerifier, agents: TokenVerifier, header: dict[str, Any], changes: dict[str, Any]
) -> None:
    text = outside_token(header, changes)
    assert verify(outside, text, outside_key) == {**OUTSIDE_CLAIMS, **changes}
    with pytest.raises(TokenError):
        verify(agents, text, outside_key)


BAD_OUTSIDE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no algorithm": ({"alg": "none"}, {}, "malformed"),
    "a shared secret": ({"alg": "HS256"}, {}, "malformed"),
    "RSA": ({"alg": "RS256"}, {}, "malformed"),
    "a key url": ({"jku": "https://a.example"}, {}, "malformed"),
    "a key of its own": ({"jwk": {"kty": "OKP"}}, {}, "malformed"),
    "a certificate url": ({"x5u": "https://a.example"}, {}, "malformed"),
    "a certificate": ({"x5c": ["MII"]}, {}, "malformed"),
    "a critical extension": ({"crit": ["b64"], "b64": False}, {}, "malformed"),
    "an identity token's type": ({"typ": "id+jwt"}, {}, "malformed"),
    "no kid": ({"kid": ABSENT}, {}, "malformed"),
    "a kid with a line feed": ({"kid": "a\n"}, {}, "malformed"),
    "a kid that is too long": ({"kid": "x" * 129}, {}, "malformed"),
    "an unknown kid": ({"kid": "signing/2"}, {}, "unknown_key"),
    "for another": ({}, {"aud": "https://relay.example"}, "audience"),
    "for others": ({}, {"aud": [AUDIENCE + "/", AUDIENCE.upper()]}, "audience"),
    "no audience": ({}, {"aud": []}, "claims"),
    "for a list of lists": ({}, {"aud": [[AUDIENCE]]}, "claims"),
    "for an object": ({}, {"aud": {AUDIENCE: 1}}, "claims"),
    "for too many": ({}, {"aud": [AUDIENCE] * 17}, "claims"),
    "good later": ({}, {"nbf": NOW_S + LEEWAY_S + 1}, "not_yet"),
    "good only when it has ended": ({}, {"nbf": NOW_S + 4, "exp": NOW_S + 3}, "not_yet"),
    "a beginning that is text": ({}, {"nbf": str(NOW_S)}, "claims"),
    "an end beyond numbers": ({}, {"exp": 1e300}, "claims"),
    "expired": ({}, {"iat": NOW_S - 60, "exp": NOW_S - LEEWAY_S}, "expired"),
    "a subject with a control character": ({}, {"sub": "a\x1b[31m"}, "claims"),
    "a subject with a line feed": ({}, {"sub": "a\n"}, "claims"),
    "a subject beyond ASCII": ({}, {"sub": "caf\xe9"}, "claims"),
    "a subject that is too long": ({}, {"sub": "x" * 256}, "claims"),
    "no subject": ({}, {"sub": ""}, "claims"),
    "a jti with a control character": ({}, {"jti": "a\x00"}, "claims"),
    "a jti that is too long": ({}, {"jti": "x" * 129}, "claims"),
    "a tenant of another alphabet": ({}, {"tenant": "Acme Inc"}, "claims"),
    "scopes in a list": ({}, {"scope": ["tools:call:read_only"]}, "claims"),
    "a node's class": ({}, {"token_class": "device_runtime"}, "claims"),
    **{f"without {name}": ({}, {name: ABSENT}, "claims") for name in CLAIMS},
}


@pytest.mark.parametrize(("header", "changes", "reason"), BAD_OUTSIDE.values(), ids=BAD_OUTSIDE)
def test_a_bad_token_of_an_outside_issuer_is_refused_with_a_fixed_word(
    outside: TokenVerifier, header: dict[str, Any], changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(TokenError) as caught:
        verify(outside, outside_token(header, changes), outside_key)
    assert caught.value.reason == reason


def test_the_name_of_a_key_is_read_without_a_look_at_the_signature(outside: TokenVerifier) -> None:
    header, _, _ = outside_token({}, {}).partition(".")
    assert outside.kid_of(f"{header}..") == OUTSIDE_HEADER["kid"]
    with pytest.raises(TokenError, match="malformed"):
        outside.kid_of(header)
