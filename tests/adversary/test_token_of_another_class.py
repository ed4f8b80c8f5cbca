"""Attacker: a node that would be an agent, and an agent that would be a node. Tried: a good token of each
class at the other class's endpoint, and claims of the other class under a signature that it accepts.

What must happen: 401 with a ``token_refused`` line at ``/mcp``; 4001 with a ``node_refused`` line at the
nodes'.
"""

import pytest

from schemas.addresses import mcp_url
from tests.fakes.forged import NOW_S, RELAY_KEY, agent_claims, agent_token, jws, kid_of
from tests.fakes.hub import PUBLIC_URL
from tests.fakes.node_end import NodeEnd, device_token
from tests.fakes.served_relay import HERE, ServedRelay, auth_for
from tests.fakes.signer import NODE_ID, NOW_MS, SimulatedNode

pytestmark = pytest.mark.asyncio(loop_scope="module")

NONCE = "n" * 43


async def present(end: NodeEnd, token: str) -> None:
    """Answer the challenge with ``token``."""
    challenge = await end.receive("challenge")
    await end.send("auth", auth_for(end.node, challenge, token=token), challenge.msg_id)


@pytest.mark.parametrize("audience", [PUBLIC_URL, mcp_url(PUBLIC_URL)])
async def test_a_nodes_token_opens_nothing_for_agents(
    relay: ServedRelay, node: SimulatedNode, audience: str
) -> None:
    challenge = {"server_time_ms": NOW_MS, "audience": audience, "nonce": NONCE}
    reply = await relay.call(f"sysecho.{NODE_ID}.echo.invoke", device_token(node, challenge))
    assert reply.status == 401
    assert relay.refusals() == [("token_refused", HERE, "unknown_key", 1)]
    assert relay.calls() == []


async def test_a_nodes_claims_under_the_relays_own_signature_open_nothing_for_agents(
    relay: ServedRelay,
) -> None:
    claims = {
        "iss": NODE_ID,
        "sub": NODE_ID,
        "aud": mcp_url(PUBLIC_URL),
        "nonce": NONCE,
        "iat": NOW_S,
        "exp": NOW_S + 60,
        "jti": "jti-1",
        "scope": "device:connect",
        "token_class": "device_runtime",
    }
    header = {"alg": "EdDSA", "kid": kid_of(RELAY_KEY)}
    token = jws(header, claims, lambda data: RELAY_KEY.sign(data).signature)
    assert (await relay.mcp("tools/list", token=token)).status == 401
    assert relay.refusals() == [("token_refused", HERE, "claims", 1)]


async def test_an_agents_token_admits_no_node(relay: ServedRelay, node: SimulatedNode) -> None:
    async with relay.end(node) as end:
        await present(end, agent_token(relay.hub))
        assert await end.until_closed() == (4001, [])
    assert relay.refusals() == [("node_refused", HERE, "token_unknown_key", 1)]


async def test_an_agents_claims_under_the_nodes_own_signature_admit_no_node(
    relay: ServedRelay, node: SimulatedNode
) -> None:
    claims = agent_claims(relay.hub, aud=PUBLIC_URL, sub=NODE_ID, iss=NODE_ID)
    token = jws({"alg": "EdDSA", "kid": node.kid}, claims, node.sign)
    async with relay.end(node) as end:
        await present(end, token)
        assert await end.until_closed() == (4001, [])
    assert relay.refusals() == [("node_refused", HERE, "token_claims", 1)]
