import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from nacl.signing import SigningKey

from relay.auth import Authenticator, TokenIssuer, key_id, load_or_create_token_key
from schemas.registry import SchemaRegistry, ViolationError
from schemas.tokens import AGENT_REF, TokenError, TokenVerifier, sign_token
from tests.fakes.clock import FakeClock
from tests.fakes.signer import ABSENT, NOW_MS, key_named

ISSUER = "https://relay.example"
AUDIENCE = "https://relay.example/mcp"
KEY = key_named("the relay's token key")
NOW_S = NOW_MS // 1000
CLAIMS: Mapping[str, Any] = {
    "iss": ISSUER,
    "aud": AUDIENCE,
    "sub": "agent-1",
    "tenant": "acme",
    "scope": "tools:call:read_only",
    "iat": NOW_S,
    "exp": NOW_S + 60,
    "jti": "jti-1",
    "token_class": "agent_runtime",
}


class CountingVerifier(TokenVerifier):
    """Counts how often a signature is looked at."""

    def __init__(self, registry: SchemaRegistry) -> None:
        super().__init__(registry, AGENT_REF)
        self.verified = 0

    def verify(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self.verified += 1
        return super().verify(*args, **kwargs)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(NOW_MS)


@pytest.fixture
def verifier(registry: SchemaRegistry) -> CountingVerifier:
    return CountingVerifier(registry)


@pytest.fixture
def authenticator(verifier: CountingVerifier, clock: FakeClock) -> Authenticator:
    public_key = bytes(KEY.verify_key)
    return Authenticator(verifier, {key_id(public_key): public_key}, ISSUER, AUDIENCE, clock)


def token(key: SigningKey = KEY, kid: str | None = None, **claims: Any) -> str:
    members = {name: value for name, value in {**CLAIMS, **claims}.items() if value is not ABSENT}
    return sign_token(key, kid or key_id(bytes(key.verify_key)), members)


def refused(authenticator: Authenticator, text: str) -> str:
    with pytest.raises(TokenError) as caught:
        authenticator.identify(text)
    return caught.value.reason


def test_a_good_token_says_who_calls(authenticator: Authenticator) -> None:
    principal = authenticator.identify(token(scope="tools:call:read_only sessions:message"))
    assert (principal.tenant, principal.sub, principal.jti) == ("acme", "agent-1", "jti-1")
    assert principal.issuer == ISSUER
    assert principal.expires_s == NOW_S + 60
    assert principal.scopes == {"tools:call:read_only", "sessions:message"}


@pytest.mark.parametrize(
    ("scope", "classes"),
    [
        pytest.param("tools:call:read_only", {"read_only"}, id="read only"),
        pytest.param("tools:call:reversible", {"reversible"}, id="one class does not hold the lesser"),
        pytest.param(
            "tools:call:read_only tools:call:reversible tools:call:physical_actuation",
            {"read_only", "reversible", "physical_actuation"},
            id="all",
        ),
        pytest.param("sessions:message", set(), id="none"),
        pytest.param("tools:call:read_only:x tools:call", set(), id="nearly"),
    ],
)
def test_scopes_reach_the_safety_classes_that_they_name(
    authenticator: Authenticator, scope: str, classes: set[str]
) -> None:
    assert authenticator.identify(token(scope=scope)).safety_classes == classes


STRANGER = key_named("a stranger")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param("", "malformed", id="empty"),
        pytest.param("a.b.c", "malformed", id="not a token"),
        pytest.param("\xff.b.c", "malformed", id="not ASCII"),
        pytest.param(token() + "x", "malformed", id="with a tail"),
        pytest.param(token(STRANGER), "unknown_key", id="a stranger's key"),
        pytest.param(
            token(STRANGER, key_id(bytes(KEY.verify_key))), "signature", id="a stranger's signature"
        ),
        pytest.param(token(iss="https://other.example"), "issuer", id="another issuer"),
        pytest.param(token(aud=ISSUER), "audience", id="the audience of nodes"),
        pytest.param(token(aud="https://other.example/mcp"), "audience", id="another relay"),
        pytest.param(token(token_class="device_runtime"), "claims", id="a node's class"),
        pytest.param(token(exp=NOW_S), "not_yet", id="no life at all"),
        pytest.param(token(iat=NOW_S - 60, exp=NOW_S), "expired", id="expires now"),
        pytest.param(token(iat=NOW_S - 60, exp=NOW_S - 10), "expired", id="expired"),
        pytest.param(token(iat=NOW_S + 30), "not_yet", id="from the future"),
        pytest.param(token(tenant="*"), "claims", id="every tenant"),
        pytest.param(token(role="admin"), "claims", id="one claim more"),
        *(
            pytest.param(token(**dict[str, Any]({name: ABSENT})), "claims", id=f"without {name}")
            for name in CLAIMS
        ),
    ],
)
def test_a_token_that_is_not_provably_ours_is_nobodys(
    authenticator: Authenticator, text: str, reason: str
) -> None:
    assert refused(authenticator, text) == reason
    assert refused(authenticator, text) == reason


def test_a_signature_is_checked_once_a_token(
    authenticator: Authenticator, verifier: CountingVerifier
) -> None:
    first, second = token(), token(sub="agent-2")
    assert authenticator.identify(first) is authenticator.identify(first)
    assert authenticator.identify(second).sub == "agent-2"
    assert verifier.verified == 2


def test_a_token_that_was_good_ends_at_its_second_without_leeway(
    authenticator: Authenticator, clock: FakeClock
) -> None:
    text = token(exp=NOW_S + 60)
    authenticator.identify(text)
    clock.advance(59_999)
    authenticator.identify(text)
    clock.advance(1)
    assert refused(authenticator, text) == "expired"
    assert refused(authenticator, text) == "expired"


def test_memory_of_tokens_is_bounded(authenticator: Authenticator, verifier: CountingVerifier) -> None:
    tokens = [token(jti=f"jti-{number}") for number in range(4097)]
    for text in tokens:
        authenticator.identify(text)
    authenticator.identify(tokens[-1])
    assert verifier.verified == 4097
    authenticator.identify(tokens[0])
    assert verifier.verified == 4098


# --- issuing ------------------------------------------------------------------------------------------


def issue(registry: SchemaRegistry, **facts: Any) -> str:
    good: dict[str, Any] = {
        "sub": "agent-1",
        "tenant": "acme",
        "scopes": ["tools:call:read_only"],
        "now_s": NOW_S,
        "ttl_s": 60,
        "jti": "jti-1",
    }
    return TokenIssuer(KEY, ISSUER, AUDIENCE, registry).issue(**good | facts)


def test_what_is_issued_is_accepted(registry: SchemaRegistry, authenticator: Authenticator) -> None:
    scopes = ["tools:call:read_only", "sessions:message"]
    principal = authenticator.identify(issue(registry, scopes=scopes))
    assert principal.scopes == set(scopes)
    assert principal.expires_s == NOW_S + 60


@pytest.mark.parametrize(
    ("facts", "where"),
    [
        pytest.param({"tenant": "Acme"}, "/tenant", id="tenant"),
        pytest.param({"sub": ""}, "/sub", id="no sub"),
        pytest.param({"sub": "two words"}, "/sub", id="sub with a space"),
        pytest.param({"sub": "a\x1b[31m"}, "/sub", id="sub with a control character"),
        pytest.param({"scopes": []}, "/scope", id="no scope"),
        pytest.param({"jti": "a b"}, "/jti", id="jti"),
    ],
)
def test_what_would_not_be_accepted_is_not_issued(
    registry: SchemaRegistry, facts: dict[str, Any], where: str
) -> None:
    with pytest.raises(ViolationError) as caught:
        issue(registry, **facts)
    assert caught.value.where == where


# --- the key ------------------------------------------------------------------------------------------


def test_the_token_key_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "state" / "token.key"
    key = load_or_create_token_key(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert load_or_create_token_key(path) == key
    assert load_or_create_token_key(tmp_path / "other.key") != key


def test_a_token_key_that_others_can_read_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "token.key"
    load_or_create_token_key(path)
    path.chmod(0o640)
    with pytest.raises(PermissionError, match="chmod 600"):
        load_or_create_token_key(path)


@pytest.mark.parametrize("content", [b"", b"secret words", b"\xfe\xff"])
def test_a_damaged_token_key_is_an_error_that_names_the_file_and_shows_nothing_of_it(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "token.key"
    path.touch(mode=0o600)
    path.write_bytes(content)
    with pytest.raises(OSError, match=r"token\.key is damaged") as caught:
        load_or_create_token_key(path)
    assert "secret" not in str(caught.value)
    assert "0xfe" not in str(caught.value)
    assert path.read_bytes() == content
