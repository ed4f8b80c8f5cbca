"""Attacker: the holder of a token that was made for something else, or by an issuer that is careless. Tried:
each claim missing, of another type, or with a value that another check of another system would let
through; signed with the relay's own key, so that the claim is all that is wrong.

What must happen: 401, nothing called, a ``token_refused`` line with the reason.
"""

from typing import Any

import pytest

from tests.fakes.forged import agent_token
from tests.fakes.served_relay import HERE, ServedRelay
from tests.fakes.signer import ABSENT, NODE_ID, TENANT

pytestmark = pytest.mark.asyncio(loop_scope="module")

CLAIMS = ["iss", "aud", "sub", "tenant", "scope", "iat", "exp", "jti", "token_class"]
ECHO_NAME = f"sysecho.{NODE_ID}.echo.invoke"


async def refused(relay: ServedRelay, reason: str, **claims: Any) -> None:
    async with relay.session(relay.hub.ca.issue()):
        reply = await relay.call(ECHO_NAME, agent_token(relay.hub, **claims))
        assert reply.status == 401
        assert reply.headers["www-authenticate"].startswith('Bearer error="invalid_token"')
        assert relay.refusals() == [("token_refused", HERE, reason, 1)]
        assert relay.calls() == []


@pytest.mark.parametrize("claim", CLAIMS)
async def test_a_token_without_one_of_its_claims_is_refused(relay: ServedRelay, claim: str) -> None:
    await refused(relay, "claims", **{claim: ABSENT})


@pytest.mark.parametrize("value", [None, True, 1.5, [], {}, "", ["a"]])
@pytest.mark.parametrize("claim", CLAIMS)
async def test_a_claim_of_another_type_is_refused(relay: ServedRelay, claim: str, value: Any) -> None:
    await refused(relay, "claims", **{claim: value})


@pytest.mark.parametrize(
    ("claim", "value", "reason"),
    [
        pytest.param("aud", "https://relay.example", "audience", id="the relay and not its /mcp"),
        pytest.param("aud", "https://relay.example/mcp/", "audience", id="a slash more"),
        pytest.param("aud", "https://RELAY.example/mcp", "audience", id="capitals"),
        pytest.param("aud", "https://relay.example.evil.example/mcp", "audience", id="a longer name"),
        pytest.param("aud", "http://relay.example/mcp", "audience", id="in the clear"),
        pytest.param("aud", ["https://relay.example/mcp"], "claims", id="a list with the right one"),
        pytest.param("iss", "https://evil.example", "issuer", id="another issuer"),
        pytest.param("iss", "https://relay.example/", "issuer", id="the issuer and a slash"),
        pytest.param("sub", "a b", "claims", id="a sub with a space"),
        pytest.param("sub", "a\nb", "claims", id="a sub of two lines"),
        pytest.param("sub", "a\x1b[31m", "claims", id="a sub with a control code"),
        pytest.param("tenant", "*", "claims", id="every tenant"),
        pytest.param("tenant", f"{TENANT},other", "claims", id="two tenants"),
        pytest.param("tenant", TENANT.upper(), "claims", id="a tenant in capitals"),
        pytest.param("tenant", f"{TENANT}\n", "claims", id="a tenant and a line end"),
        pytest.param("scope", "*", "claims", id="every scope"),
        pytest.param("scope", "tools:call:read_only  sessions:message", "claims", id="two spaces"),
        pytest.param("scope", " tools:call:read_only", "claims", id="a space before"),
        pytest.param("jti", "a/../b", "claims", id="a jti that is a path"),
        pytest.param("token_class", "device_runtime", "claims", id="a node's class"),
        pytest.param("token_class", "admin", "claims", id="a class that is none"),
        pytest.param("token_class", "agent_runtime ", "claims", id="the class and a space"),
        pytest.param("admin", True, "claims", id="a claim more"),
        pytest.param("nbf", 0, "claims", id="a claim of the standard that is not ours"),
    ],
)
async def test_a_claim_with_another_value_is_refused(
    relay: ServedRelay, claim: str, value: Any, reason: str
) -> None:
    await refused(relay, reason, **{claim: value})


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
