"""Attacker: any client of ``/mcp``: the owner of another key or relay, or of a token for something else.

Tried: tokens that ask not to be verified, or to be verified with a key of the attacker's choice; with a MAC
that is keyed with the relay's public key; of another time, class, issuer or audience; with claims that a
careless check would let through, signed with the relay's own key, so that the claim is all that is wrong.

What must happen: 401 that challenges with ``invalid_token``, nothing listed or called, and a
``token_refused`` line with the reason.
"""

import hmac
import socket
from typing import Any

import pytest

from schemas.addresses import mcp_url
from schemas.keys import base64url
from schemas.manifest import MAX_FUTURE_MS
from schemas.tokens import CLOCK_LEEWAY_S
from tests.fakes.environment import PUBLIC_URL
from tests.fakes.forged import NOW_S, RELAY_KEY, agent_claims, agent_token, jws, kid_of
from tests.fakes.node_end import device_token
from tests.fakes.served_relay import HERE, ServedRelay
from tests.fakes.signer import ABSENT, NODE_ID, NOW_MS, TENANT, SimulatedNode, key_named

pytestmark = pytest.mark.asyncio(loop_scope="module")

ECHO_NAME = f"sysecho.{NODE_ID}.echo.invoke"
ATTACKERS_KEY = key_named("an attacker's own")
JWK = {"kty": "OKP", "crv": "Ed25519", "x": base64url(bytes(ATTACKERS_KEY.verify_key))}
PUBLIC_KEY = bytes(RELAY_KEY.verify_key)
OTHER = "https://staging.example"
CLAIMS = ["iss", "aud", "sub", "tenant", "scope", "iat", "exp", "jti", "token_class"]


async def refused(relay: ServedRelay, token: str, reason: str) -> None:
    async with relay.session(relay.hub.ca.issue()):
        reply = await relay.call(ECHO_NAME, token)
    assert reply.status == 401
    assert reply.headers["www-authenticate"].startswith('Bearer error="invalid_token"')
    assert relay.refusals() == [("token_refused", HERE, reason, 1)]
    assert relay.calls() == []


@pytest.mark.parametrize("alg", ["none", "None", "NONE", "nOnE", "", None, "EdDSA"])
async def test_a_token_without_a_signature_is_refused(relay: ServedRelay, alg: str | None) -> None:
    header = {"alg": alg, "kid": kid_of(RELAY_KEY), "typ": "JWT"}
    token = jws(header, agent_claims(relay.hub), lambda _data: b"")
    await refused(relay, token, "signature" if alg == "EdDSA" else "malformed")


@pytest.mark.parametrize("alg", ["HS256", "HS384", "HS512", "EdDSA"])
@pytest.mark.parametrize(
    "secret",
    [PUBLIC_KEY, PUBLIC_KEY.hex().encode(), base64url(PUBLIC_KEY).encode(), b""],
    ids=["raw", "hex", "base64url", "nothing"],
)
async def test_a_mac_that_is_keyed_with_the_public_key_is_refused(
    relay: ServedRelay, alg: str, secret: bytes
) -> None:
    digest = {"EdDSA": "sha512"}.get(alg, alg.replace("HS", "sha"))
    header = {"alg": alg, "kid": kid_of(RELAY_KEY), "typ": "JWT"}
    token = jws(header, agent_claims(relay.hub), lambda data: hmac.digest(secret, data, digest))
    await refused(relay, token, "signature" if alg == "EdDSA" else "malformed")


@pytest.mark.parametrize(
    ("kid", "reason"),
    [
        pytest.param(kid_of(ATTACKERS_KEY), "unknown_key", id="the attacker's own"),
        pytest.param(kid_of(RELAY_KEY), "signature", id="the relay's"),
        pytest.param(kid_of(RELAY_KEY).upper(), "unknown_key", id="the relay's in capitals"),
        pytest.param(kid_of(RELAY_KEY)[:-1], "unknown_key", id="the relay's but for a letter"),
        pytest.param("", "malformed", id="empty"),
        pytest.param(ABSENT, "malformed", id="none"),
        pytest.param(None, "malformed", id="null"),
        pytest.param(7, "malformed", id="a number"),
        pytest.param(["a", "b"], "malformed", id="a list"),
        pytest.param("../../../dev/null", "malformed", id="a path"),
        pytest.param("x' UNION SELECT 'y", "malformed", id="a statement"),
        pytest.param("x\x00y", "malformed", id="a null byte"),
        pytest.param("k" * 65, "malformed", id="too long"),
    ],
)
async def test_a_token_of_another_key_is_refused_whatever_it_calls_the_key(
    relay: ServedRelay, kid: Any, reason: str
) -> None:
    await refused(relay, agent_token(relay.hub, header={"kid": kid}, key=ATTACKERS_KEY), reason)


async def test_a_nodes_key_signs_no_agents_token(relay: ServedRelay, node: SimulatedNode) -> None:
    await refused(relay, agent_token(relay.hub, header={"kid": node.kid}, key=node.key), "unknown_key")


@pytest.mark.parametrize(
    "key", [ATTACKERS_KEY, RELAY_KEY], ids=["the attacker's signature", "the relay's signature"]
)
@pytest.mark.parametrize(
    "header",
    [
        pytest.param({"jwk": JWK}, id="jwk"),
        pytest.param({"jwk": JWK, "kid": "x"}, id="jwk under a new kid"),
        pytest.param({"x5c": ["AAAA"]}, id="x5c"),
        pytest.param({"x5t": "AAAA"}, id="x5t"),
        pytest.param({"crit": ["exp"]}, id="crit"),
        pytest.param({"crit": []}, id="crit of nothing"),
        pytest.param({"b64": False, "crit": ["b64"]}, id="b64"),
        pytest.param({"zip": "DEF"}, id="zip"),
        pytest.param({"cty": "JWT"}, id="a token in a token"),
        pytest.param({"typ": "at+jwt\x1b[31m"}, id="typ"),
        pytest.param({"x": None}, id="anything"),
    ],
)
async def test_a_header_with_more_in_it_than_a_kid_is_refused(
    relay: ServedRelay, header: dict[str, Any], key: Any
) -> None:
    await refused(relay, agent_token(relay.hub, header=header, key=key), "malformed")


@pytest.mark.parametrize("name", ["jku", "x5u"])
async def test_an_address_in_a_header_is_not_visited(relay: ServedRelay, name: str) -> None:
    with socket.create_server((HERE, 0)) as own_server:
        own_server.setblocking(False)  # noqa: FBT003 - the standard library's own signature
        url = f"http://{HERE}:{own_server.getsockname()[1]}/keys.json"
        await refused(relay, agent_token(relay.hub, header={name: url}, key=ATTACKERS_KEY), "malformed")
        with pytest.raises(BlockingIOError):
            own_server.accept()


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize("value", [ABSENT, None, True, 1.5, [], {}, "", ["a"]])
async def test_a_claim_that_is_missing_or_of_another_type_is_refused(
    relay: ServedRelay, claim: str, value: Any
) -> None:
    await refused(relay, agent_token(relay.hub, **{claim: value}), "claims")


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        pytest.param({"aud": "https://relay.example"}, "audience", id="the relay and not its /mcp"),
        pytest.param({"aud": "https://relay.example/mcp/"}, "audience", id="a slash more"),
        pytest.param({"aud": "https://RELAY.example/mcp"}, "audience", id="capitals"),
        pytest.param({"aud": "https://relay.example.evil.example/mcp"}, "audience", id="a longer name"),
        pytest.param({"aud": "http://relay.example/mcp"}, "audience", id="in the clear"),
        pytest.param({"aud": ["https://relay.example/mcp"]}, "claims", id="a list with the right one"),
        pytest.param({"aud": mcp_url(OTHER)}, "audience", id="of this relay for another"),
        pytest.param({"iss": OTHER, "aud": mcp_url(OTHER)}, "audience", id="of another relay, same key"),
        pytest.param({"iss": OTHER}, "issuer", id="of another relay for this one"),
        pytest.param({"iss": "https://relay.example/"}, "issuer", id="the issuer and a slash"),
        pytest.param({"sub": "a b"}, "claims", id="a sub with a space"),
        pytest.param({"sub": "a\nb"}, "claims", id="a sub of two lines"),
        pytest.param({"sub": "a\x1b[31m"}, "claims", id="a sub with a control code"),
        pytest.param({"tenant": "*"}, "claims", id="every tenant"),
        pytest.param({"tenant": f"{TENANT},other"}, "claims", id="two tenants"),
        pytest.param({"tenant": TENANT.upper()}, "claims", id="a tenant in capitals"),
        pytest.param({"tenant": f"{TENANT}\n"}, "claims", id="a tenant and a line end"),
        pytest.param({"scope": "*"}, "claims", id="every scope"),
        pytest.param({"scope": "tools:call:read_only  sessions:message"}, "claims", id="two spaces"),
        pytest.param({"scope": " tools:call:read_only"}, "claims", id="a space before"),
        pytest.param({"jti": "a/../b"}, "claims", id="a jti that is a path"),
        pytest.param({"token_class": "device_runtime"}, "claims", id="a node's class"),
        pytest.param({"token_class": "admin"}, "claims", id="a class that is none"),
        pytest.param({"token_class": "agent_runtime "}, "claims", id="the class and a space"),
        pytest.param({"admin": True}, "claims", id="a claim more"),
        pytest.param({"nbf": 0}, "claims", id="a claim of the standard that is not ours"),
        pytest.param({"iat": NOW_S - 3600, "exp": NOW_S - CLOCK_LEEWAY_S}, "expired", id="expired"),
        pytest.param({"iat": 0, "exp": 1}, "expired", id="of 1970"),
        pytest.param({"iat": NOW_S - 60, "exp": NOW_S}, "expired", id="expired this second"),
        pytest.param(
            {"iat": NOW_S + MAX_FUTURE_MS // 1000 + 1, "exp": NOW_S + 3600}, "not_yet", id="from the future"
        ),
        pytest.param({"iat": NOW_S, "exp": NOW_S}, "not_yet", id="of no length"),
        pytest.param({"iat": NOW_S + 3, "exp": NOW_S + 2}, "not_yet", id="backwards"),
    ],
)
async def test_a_claim_with_another_value_is_refused(
    relay: ServedRelay, claims: dict[str, Any], reason: str
) -> None:
    await refused(relay, agent_token(relay.hub, **claims), reason)


async def test_a_token_that_expires_while_it_is_used_is_refused_from_then_on(relay: ServedRelay) -> None:
    token = agent_token(relay.hub, exp=NOW_S + 60)
    assert (await relay.mcp("tools/list", token=token)).status == 200
    relay.hub.clock.advance(60_000)
    for _ in range(3):
        assert (await relay.mcp("tools/list", token=token)).status == 401
    assert relay.refusals() == [("token_refused", HERE, "expired", 3)]


@pytest.mark.holds("RFC-0005/5/device-scope")
@pytest.mark.parametrize("audience", [PUBLIC_URL, mcp_url(PUBLIC_URL)])
async def test_a_nodes_token_opens_nothing_for_agents(
    relay: ServedRelay, node: SimulatedNode, audience: str
) -> None:
    challenge = {"server_time_ms": NOW_MS, "audience": audience, "nonce": "n" * 43}
    await refused(relay, device_token(node, challenge), "unknown_key")


async def test_a_nodes_claims_under_the_relays_own_signature_open_nothing_for_agents(
    relay: ServedRelay,
) -> None:
    claims = {
        "iss": NODE_ID,
        "sub": NODE_ID,
        "aud": mcp_url(PUBLIC_URL),
        "nonce": "n" * 43,
        "iat": NOW_S,
        "exp": NOW_S + 60,
        "jti": "jti-1",
        "scope": "device:connect",
        "token_class": "device_runtime",
    }
    header = {"alg": "EdDSA", "kid": kid_of(RELAY_KEY)}
    token = jws(header, claims, lambda data: RELAY_KEY.sign(data).signature)
    await refused(relay, token, "claims")


@pytest.mark.parametrize(
    "scope",
    [
        "tools:call:reversible tools:call:physical_actuation sessions:message",
        "tools:call:read_only_x",
        "tools:call",
        "tools:call:",
        "tools:call:read_only:",
        "admin",
    ],
)
async def test_a_scope_that_is_nearly_the_right_one_gives_nothing(relay: ServedRelay, scope: str) -> None:
    async with relay.session(relay.hub.ca.issue()):
        token = agent_token(relay.hub, scope=scope)
        listed = await relay.mcp("tools/list", token=token)
        names = [tool["name"] for tool in listed.json()["result"]["tools"]]
        assert [name for name in names if NODE_ID in name] == []
        assert (await relay.call(ECHO_NAME, token)).error()["code"] == "E_SAFETY_DENIED"
        assert relay.calls() == [("deny", "E_SAFETY_DENIED", NODE_ID)]
        assert relay.refusals() == []


# --- a good token in the wrong place: no error is named, and what was merely not sent is not in the audit


@pytest.mark.parametrize(
    ("query", "name", "form"),
    [
        *((f"?{name}={{}}", None, "") for name in ("access_token", "token", "bearer", "Authorization")),
        ("", "Cookie", "access_token={}"),
        ("", "Proxy-Authorization", "Bearer {}"),
        ("", "X-Forwarded-Authorization", "Bearer {}"),
        ("", "X-Authorization", "Bearer {}"),
        ("", "X-Api-Key", "{}"),
        ("", "Sec-WebSocket-Protocol", "bearer, {}"),
        ("", "Authorization", "{}"),
        ("", "Authorization", "Token {}"),
        ("", "Authorization", "Basic {}"),
        ("", "Authorization", "Bearer\xa0{}"),
        ("", "Authorization", "Bearer{}"),
    ],
)
async def test_a_token_in_the_query_in_another_header_or_under_another_word_is_no_token(
    relay: ServedRelay, query: str, name: str | None, form: str
) -> None:
    token = relay.hub.token()
    headers = [] if name is None else [(name, form.format(token))]
    reply = await relay.mcp("tools/list", headers=headers, path=f"/mcp{query.format(token)}")
    assert reply.status == 401
    assert reply.headers["www-authenticate"].startswith("Bearer scope=")
    assert "error=" not in reply.headers["www-authenticate"]
    assert relay.refusals() == []
    assert relay.calls() == []


async def test_a_token_in_the_body_is_no_token(relay: ServedRelay) -> None:
    body = f"access_token={relay.hub.token()}".encode()
    form = ("Content-Type", "application/x-www-form-urlencoded")
    assert (await relay.ask("POST /mcp", [form], body)).status == 401
    assert relay.refusals() == []


@pytest.mark.parametrize("which", ["good, bad", "bad, good", "good, good"])
async def test_two_tokens_are_no_token_and_stand_in_the_audit(relay: ServedRelay, which: str) -> None:
    values = {"good": f"Bearer {relay.hub.token()}", "bad": "Bearer x"}
    headers = [("Authorization", values[each]) for each in which.split(", ")]
    reply = await relay.mcp("tools/list", headers=headers)
    assert reply.status == 401
    assert "error=" not in reply.headers["www-authenticate"]
    assert relay.calls() == []
    # No client's mistake.
    assert [line[0] for line in relay.refusals()] == ["token_refused"]


async def test_two_tokens_in_one_header_are_a_bad_one(relay: ServedRelay) -> None:
    token = relay.hub.token()
    await refused(relay, f"{token}, Bearer {token}", "malformed")
