"""Agents' tokens, the keys that they are accepted by, and what is kept of a caller."""

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
from nacl.signing import SigningKey

from relay.auth.agent_tokens import (
    AcceptedKeys,
    Authenticator,
    Caller,
    Principal,
    TokenIssuer,
    TokenOptionError,
)
from relay.state.tokens import AcceptedKey, key_id
from schemas.addresses import mcp_urls
from schemas.keys import base64url
from schemas.registry import SchemaRegistry
from schemas.tokens import AGENT_REF, TokenError, TokenVerifier, sign_token
from tests.fakes.clock import FakeClock
from tests.fakes.issuer import BOUND_S, KID, OUR_KID, TwoIssuers, jwk, outside_token
from tests.fakes.issuer import ISSUER as OUTSIDE_ISSUER
from tests.fakes.issuer import KEY as OUTSIDE_KEY
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
    return Authenticator(verifier, {key_id(public_key): public_key}, ISSUER, mcp_urls(ISSUER), clock)


def token(key: SigningKey = KEY, kid: str | None = None, **claims: Any) -> str:
    members = {name: value for name, value in {**CLAIMS, **claims}.items() if value is not ABSENT}
    return sign_token(key, kid or key_id(bytes(key.verify_key)), members)


def refused(authenticator: Authenticator, text: str) -> str:
    with pytest.raises(TokenError) as caught:
        authenticator.identify(text)
    return caught.value.reason


def rejected(authenticator: Authenticator, principal: Principal) -> str:
    """Return why what was identified is accepted no longer."""
    with pytest.raises(TokenError) as caught:
        authenticator.check(principal)
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
    assert authenticator.identify(token(scope=scope)).rights.safety_classes == classes


OTHER_KEY = key_named("another")


@pytest.mark.parametrize("path", ["/mcp", "/mcp/tools", "/mcp/kinds"])
def test_a_token_for_any_path_of_mcp_is_good(authenticator: Authenticator, path: str) -> None:
    assert authenticator.identify(token(aud=f"{ISSUER}{path}")).sub == CLAIMS["sub"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param("", "malformed", id="empty"),
        pytest.param("a.b.c", "malformed", id="not a token"),
        pytest.param("\xff.b.c", "malformed", id="not ASCII"),
        pytest.param(token() + "x", "malformed", id="with a tail"),
        pytest.param(token(OTHER_KEY), "unknown_key", id="another key's key"),
        pytest.param(
            token(OTHER_KEY, key_id(bytes(KEY.verify_key))), "signature", id="another key's signature"
        ),
        pytest.param(token(iss="https://other.example"), "issuer", id="another issuer"),
        pytest.param(token(aud=ISSUER), "audience", id="the audience of nodes"),
        pytest.param(token(aud="https://other.example/mcp"), "audience", id="another relay"),
        pytest.param(token(aud=f"{ISSUER}/mcp/nodes"), "audience", id="a path that is none of MCP"),
        pytest.param(token(token_class="device_runtime"), "claims", id="a node's class"),
        pytest.param(token(exp=NOW_S), "not_yet", id="no life at all"),
        pytest.param(token(iat=NOW_S - 60, exp=NOW_S), "expired", id="expires now"),
        pytest.param(token(iat=NOW_S - 60, exp=NOW_S - 10), "expired", id="expired"),
        pytest.param(token(iat=NOW_S + 301), "not_yet", id="from the future"),
        pytest.param(token(tenant="*"), "claims", id="every tenant"),
        pytest.param(token(role="admin"), "claims", id="one claim more"),
        *(
            pytest.param(token(**dict[str, Any]({name: ABSENT})), "claims", id=f"without {name}")
            for name in CLAIMS
        ),
    ],
)
def test_a_token_that_is_not_provably_ours_authenticates_no_agent(
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
    principal = authenticator.identify(text)
    clock.advance(59_999)
    assert authenticator.identify(text) is principal
    authenticator.check(principal)
    clock.advance(1)
    assert refused(authenticator, text) == "expired"
    assert refused(authenticator, text) == "expired"
    assert rejected(authenticator, principal) == "expired"


def test_memory_of_tokens_is_bounded(authenticator: Authenticator, verifier: CountingVerifier) -> None:
    tokens = [token(jti=f"jti-{number}") for number in range(4097)]
    for text in tokens:
        authenticator.identify(text)
    authenticator.identify(tokens[-1])
    assert verifier.verified == 4097
    authenticator.identify(tokens[0])
    assert verifier.verified == 4098


async def test_without_an_outside_issuer_no_key_is_fetched(authenticator: Authenticator) -> None:
    assert await authenticator.recognise(token()) is authenticator.identify(token())
    with pytest.raises(TokenError, match="unknown_key"):
        await authenticator.recognise(token(OTHER_KEY))


def test_scopes_that_mean_nothing_here_are_not_kept(authenticator: Authenticator) -> None:
    assert authenticator.identify(token(scope="openid tools:call:read_only admin")).scopes == {
        "tools:call:read_only"
    }


# --- tokens that are void before their time -----------------------------------------------------------


def test_a_revoked_token_is_refused_whether_it_was_known_or_not(authenticator: Authenticator) -> None:
    known, fresh, other = token(jti="a"), token(jti="b"), token(jti="c")
    principal, of_other = authenticator.identify(known), authenticator.identify(other)
    authenticator.revoke(frozenset({"a", "b"}))
    assert refused(authenticator, known) == "revoked"
    assert refused(authenticator, fresh) == "revoked"
    assert rejected(authenticator, principal) == "revoked"
    assert authenticator.identify(other) is of_other
    authenticator.check(of_other)


def test_all_tokens_of_one_jti_are_void_together(authenticator: Authenticator) -> None:
    twins = [token(jti="a", sub=sub) for sub in ("agent-1", "agent-2")]
    authenticator.revoke(frozenset({"a"}))
    assert [refused(authenticator, text) for text in twins] == ["revoked", "revoked"]


def test_the_same_revocations_again_cost_no_signature(
    authenticator: Authenticator, verifier: CountingVerifier
) -> None:
    authenticator.revoke(frozenset({"a"}))
    authenticator.identify(token())
    authenticator.revoke(frozenset({"a"}))
    authenticator.identify(token())
    assert verifier.verified == 1


# --- tokens of an outside issuer ----------------------------------------------------------------------


@pytest_asyncio.fixture
async def world(registry: SchemaRegistry) -> AsyncIterator[TwoIssuers]:
    async with TwoIssuers.running(registry) as world:
        yield world


async def recognised(world: TwoIssuers, text: str) -> Principal:
    async with asyncio.timeout(BOUND_S):
        return await world.authenticator.recognise(text)


async def not_recognised(world: TwoIssuers, text: str) -> str:
    with pytest.raises(TokenError) as caught:
        await recognised(world, text)
    return caught.value.reason


@pytest.mark.integration
async def test_a_token_of_the_outside_issuer_says_who_calls(world: TwoIssuers) -> None:
    principal = await recognised(world, outside_token())
    assert (principal.tenant, principal.sub, principal.jti) == ("acme", "auth0|agent one", "onrtac:5f0e1a/2=")
    assert principal.issuer == OUTSIDE_ISSUER
    assert principal.scopes == {"tools:call:read_only"}
    assert principal.expires_s == NOW_S + 600
    assert world.authenticator.identify(outside_token()) is principal
    assert world.fetches == 1


@pytest.mark.integration
async def test_the_relays_own_tokens_count_besides_and_need_no_fetch(world: TwoIssuers) -> None:
    principal = await recognised(world, token())
    assert principal.issuer == ISSUER
    assert world.fetches == 0


def hmac_token() -> str:
    """Return a token whose shared secret is the issuer's public key."""
    parts: tuple[Mapping[str, Any], ...] = ({"alg": "HS256", "kid": KID}, {**CLAIMS, "iss": OUTSIDE_ISSUER})
    signing_input = ".".join(base64url(json.dumps(part).encode()) for part in parts)
    mac = hmac.digest(bytes(OUTSIDE_KEY.verify_key), signing_input.encode(), "sha256")
    return f"{signing_input}.{base64url(mac)}"


@pytest.mark.integration
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param(outside_token(iss=ISSUER), "issuer", id="the outside key in the relay's name"),
        pytest.param(outside_token(iss="https://other.example"), "issuer", id="in another's name"),
        pytest.param(outside_token(iss=OUTSIDE_ISSUER + "/"), "issuer", id="nearly its name"),
        pytest.param(token(iss=OUTSIDE_ISSUER), "issuer", id="our key in the outside issuer's name"),
        pytest.param(outside_token(kid=OUR_KID), "malformed", id="our kid over its signature"),
        pytest.param(
            outside_token(kid=OUR_KID, header={"typ": "JWT"}, iss=ISSUER, nbf=ABSENT),
            "signature",
            id="our kid and name over its signature",
        ),
        pytest.param(token(KEY, KID, iss=OUTSIDE_ISSUER), "signature", id="its kid over our signature"),
        pytest.param(outside_token(aud=[ISSUER, "https://relay.example/"]), "audience", id="aud without us"),
        pytest.param(outside_token(nbf=NOW_S + 301), "not_yet", id="good later"),
        pytest.param(outside_token(exp=NOW_S), "not_yet", id="no life at all"),
        pytest.param(outside_token(iat=NOW_S - 9, nbf=NOW_S - 9, exp=NOW_S), "expired", id="expires now"),
        pytest.param(outside_token(tenant=ABSENT), "claims", id="no tenant"),
        pytest.param(outside_token(token_class="device_runtime"), "claims", id="a node's class"),
        pytest.param(outside_token(header={"alg": "none"}), "malformed", id="alg none"),
        pytest.param(hmac_token(), "malformed", id="HS256 over the public key"),
        pytest.param(outside_token(header={"jku": "http://127.0.0.1:1/"}), "malformed", id="jku"),
        pytest.param(outside_token(header={"jwk": jwk()}), "malformed", id="jwk"),
        pytest.param(outside_token(header={"crit": []}), "malformed", id="crit"),
        pytest.param(outside_token(OTHER_KEY), "signature", id="another key's signature"),
        pytest.param(outside_token(kid="theirs"), "unknown_key", id="a key that the issuer has not"),
    ],
)
async def test_a_token_that_is_not_provably_the_outside_issuers_authenticates_no_agent(
    world: TwoIssuers, text: str, reason: str
) -> None:
    assert await not_recognised(world, text) == reason
    await recognised(world, outside_token())
    assert await not_recognised(world, text) == reason
    assert world.fetches == 1


@pytest.mark.integration
async def test_a_key_of_ours_in_the_issuers_set_does_not_speak_for_it(world: TwoIssuers) -> None:
    world.server.publish(jwk(KEY, "ours"), jwk(OUTSIDE_KEY, OUR_KID))
    assert await not_recognised(world, token(KEY, "ours", iss=OUTSIDE_ISSUER)) == "unknown_key"
    assert await not_recognised(world, outside_token(kid=OUR_KID, header={"typ": "JWT"})) == "signature"
    assert (await recognised(world, token())).issuer == ISSUER


@pytest.mark.integration
@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param("a.b.c", id="not a token"),
        pytest.param(outside_token(kid="x" * 129), id="a kid that cannot be"),
        pytest.param(outside_token(kid="theirs", header={"alg": "RS256"}), id="another algorithm"),
        pytest.param(outside_token(kid="theirs") + "x" * 4096, id="too long"),
    ],
)
async def test_what_is_no_token_causes_no_request_to_the_issuer(world: TwoIssuers, text: str) -> None:
    assert await not_recognised(world, text) == "malformed"
    assert world.fetches == 0


@pytest.mark.integration
async def test_strangers_with_a_thousand_keys_make_the_relay_ask_once(world: TwoIssuers) -> None:
    for number in range(1000):
        assert await not_recognised(world, outside_token(kid=f"key-{number}")) == "unknown_key"
    assert world.fetches == 1


@pytest.mark.integration
async def test_a_new_key_of_the_issuer_is_learnt_from_the_first_token_that_names_it(
    world: TwoIssuers,
) -> None:
    await recognised(world, outside_token())
    world.server.publish(jwk(), jwk(OTHER_KEY, "next"))
    world.clock.advance(10_000)
    assert (await recognised(world, outside_token(OTHER_KEY, "next"))).issuer == OUTSIDE_ISSUER
    assert world.fetches == 2


@pytest.mark.integration
async def test_a_token_that_was_good_is_refused_once_its_key_is_withdrawn(world: TwoIssuers) -> None:
    await recognised(world, outside_token())
    ours = await recognised(world, token())
    world.server.publish(jwk(OTHER_KEY, "next"))
    world.clock.advance(10_000)
    await recognised(world, outside_token(OTHER_KEY, "next"))
    assert refused(world.authenticator, outside_token()) == "unknown_key"
    assert world.authenticator.identify(token()) == ours


@pytest.mark.integration
async def test_a_key_that_is_replaced_under_its_name_is_withdrawn(world: TwoIssuers) -> None:
    principal, ours = await recognised(world, outside_token()), await recognised(world, token())
    world.authenticator.check(principal)
    world.server.publish(jwk(OTHER_KEY))
    world.clock.advance(10_000)
    await not_recognised(world, outside_token(kid="unknown"))
    assert refused(world.authenticator, outside_token()) == "signature"
    assert rejected(world.authenticator, principal) == "unknown_key"
    world.authenticator.check(ours)
    await recognised(world, outside_token(OTHER_KEY))


@pytest.mark.integration
async def test_without_its_issuer_no_token_of_it_is_accepted(world: TwoIssuers) -> None:
    world.server.say("503 Service Unavailable", b"")
    assert await not_recognised(world, outside_token()) == "unknown_key"
    assert (await recognised(world, token())).issuer == ISSUER


@pytest.mark.integration
async def test_a_token_of_the_outside_issuer_can_be_revoked(world: TwoIssuers) -> None:
    principal = await recognised(world, outside_token())
    world.authenticator.revoke(frozenset({principal.jti}))
    assert refused(world.authenticator, outside_token()) == "revoked"
    assert await not_recognised(world, outside_token()) == "revoked"


# --- what was identified, checked again ----------------------------------------------------------------


def test_a_principal_that_another_relay_has_recognised_is_checked_here_too(
    authenticator: Authenticator,
) -> None:
    facts = authenticator.identify(token()).facts()
    assert authenticator.forwarded(**facts).jti == facts["jti"]
    authenticator.revoke(frozenset({facts["jti"]}))
    with pytest.raises(TokenError) as caught:
        authenticator.forwarded(**facts)
    assert caught.value.reason == "revoked"


def test_a_token_is_accepted_until_its_key_ends(verifier: CountingVerifier, clock: FakeClock) -> None:
    public_key, kid = bytes(KEY.verify_key), key_id(bytes(KEY.verify_key))
    keys = AcceptedKeys(clock)
    keys.accept({kid: AcceptedKey(public_key, None)})
    authenticator = Authenticator(verifier, keys, ISSUER, mcp_urls(ISSUER), clock)
    principal = authenticator.identify(token())
    keys.accept({kid: AcceptedKey(public_key, NOW_MS + 1)})
    authenticator.check(principal)
    assert authenticator.identify(token()) is principal
    clock.advance(1)
    assert refused(authenticator, token()) == "unknown_key"
    assert rejected(authenticator, principal) == "unknown_key"


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


def test_a_token_is_for_the_kinds_that_it_was_issued_for(
    registry: SchemaRegistry, authenticator: Authenticator
) -> None:
    assert authenticator.identify(issue(registry)).kinds is None
    principal = authenticator.identify(issue(registry, kinds=["linux.*", "linux.journal"]))
    assert principal.rights.kinds == ("linux.*", "linux.journal")
    with pytest.raises(TokenOptionError, match="/kinds"):
        issue(registry, kinds=["Linux"])


def test_a_token_is_for_the_nodes_that_it_was_issued_for_at_every_relay(
    registry: SchemaRegistry, authenticator: Authenticator
) -> None:
    assert authenticator.identify(issue(registry)).nodes is None
    principal = authenticator.identify(issue(registry, kinds=["linux.*"], nodes=["tag:greenhouse", "!barn"]))
    assert principal.rights.nodes == ("tag:greenhouse", "!barn")
    assert authenticator.forwarded(**principal.facts()).rights == principal.rights


@pytest.mark.parametrize("claim", ["kinds", "nodes"])
@pytest.mark.parametrize(
    "patterns", [["!x"], [""], ["a\nb"], [" a"], ["a "], ["a" * 81], ["é"], ["a"] * 33, ["!"]]
)
def test_patterns_that_are_none_are_not_signed(
    registry: SchemaRegistry, claim: str, patterns: list[Any]
) -> None:
    with pytest.raises(TokenOptionError, match=f"/{claim}"):
        issue(registry, **{claim: patterns})


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
    with pytest.raises(TokenOptionError) as caught:
        issue(registry, **facts)
    assert caught.value.where == where


def test_what_is_longer_than_any_token_that_is_accepted_is_not_issued(registry: SchemaRegistry) -> None:
    nodes = [f"{'n' * 78}{number:02}" for number in range(32)]
    with pytest.raises(TokenOptionError, match="/nodes"):
        issue(registry, sub="s" * 128, nodes=nodes)
    kinds = [f"{'k' * 63}{number:02}" for number in range(32)]
    with pytest.raises(TokenOptionError, match="/kinds"):
        issue(registry, kinds=[f"{each[:-1]}*" for each in kinds], nodes=[each[:50] for each in nodes])


OLD, NEW = b"o" * 32, b"n" * 32


def test_a_key_is_accepted_until_its_end() -> None:
    clock = FakeClock(NOW_MS)
    keys = AcceptedKeys(clock)
    assert keys.accept({"old": AcceptedKey(OLD, NOW_MS + 1), "new": AcceptedKey(NEW, None)}) == {"old", "new"}
    assert dict(keys) == {"old": OLD, "new": NEW}
    clock.advance(1)
    assert keys.get("old") is None
    assert dict(keys) == {"new": NEW}
    assert len(keys) == 1


def test_only_the_keys_of_the_last_time_are_accepted() -> None:
    keys = AcceptedKeys(FakeClock(NOW_MS))
    keys.accept({"old": AcceptedKey(OLD, None)})
    assert keys.accept({"old": AcceptedKey(OLD, NOW_MS), "new": AcceptedKey(NEW, None)}) == {"new"}
    assert dict(keys) == {"new": NEW}
    assert keys.accept({}) == set()
    assert dict(keys) == {}


def test_an_end_that_was_known_stays() -> None:
    keys = AcceptedKeys(FakeClock(NOW_MS))
    keys.accept({"old": AcceptedKey(OLD, NOW_MS), "new": AcceptedKey(NEW, None)})
    keys.accept({"old": AcceptedKey(OLD, None), "new": AcceptedKey(NEW, None)})
    assert dict(keys) == {"new": NEW}


PRINCIPAL = Principal(
    tenant="acme",
    sub="agent-1",
    jti="jti-1",
    issuer="https://relay.example",
    scopes=frozenset(),
    expires_s=1,
    kid="k",
    key=bytes(32),
)


def test_a_digest_is_the_same_for_every_token_of_an_agent_and_another_for_any_other() -> None:
    assert replace(PRINCIPAL, jti="jti-2", kid="l").digest == PRINCIPAL.digest
    others = [
        replace(PRINCIPAL, sub="agent-2"),
        replace(PRINCIPAL, tenant="acmea", sub="gent-1"),
        replace(PRINCIPAL, issuer="https://relay.exampl", tenant="eacme"),
    ]
    assert len({PRINCIPAL.digest, *(other.digest for other in others)}) == 4
    assert len(PRINCIPAL.digest) == 64


@pytest.mark.parametrize(
    ("headers", "trace"),
    [
        pytest.param({b"traceparent": "00-ab-cd-01"}, "00-ab-cd-01", id="as it was sent"),
        pytest.param({b"tracestate": "x"}, None, id="none"),
    ],
)
def test_the_trace_is_the_requests_own(headers: dict[bytes, str], trace: str | None) -> None:
    caller = Caller(PRINCIPAL, "http", headers)
    assert caller.traceparent == trace
    assert (caller.query, caller.size) == ("", 0)
