"""Attacker: a rogue relay that was given a good token for itself. Tried: that token, and others for audiences
that are nearly the relay's, on the relay's own challenge.

What must happen: 4001, no session, a ``node_refused`` line.
"""

import pytest

from tests.fakes.hub import PUBLIC_URL
from tests.fakes.served_relay import HERE, ServedRelay
from tests.fakes.signer import TENANT, SimulatedNode

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize(
    ("audience", "reason"),
    [
        pytest.param("https://rogue.example", "token_audience", id="the rogue's"),
        pytest.param(f"{PUBLIC_URL}/", "token_audience", id="a slash more"),
        pytest.param(f"{PUBLIC_URL}/mcp", "token_audience", id="the agents' audience"),
        pytest.param(f"{PUBLIC_URL}:443", "token_audience", id="with its port"),
        pytest.param(PUBLIC_URL.upper(), "token_audience", id="capitals"),
        pytest.param("http://relay.example", "token_audience", id="in the clear"),
        pytest.param([PUBLIC_URL], "token_claims", id="a list"),
        pytest.param([PUBLIC_URL, "https://rogue.example"], "token_claims", id="a list of two"),
        pytest.param("", "token_claims", id="none"),
    ],
)
async def test_a_token_for_another_audience_is_refused(
    relay: ServedRelay, node: SimulatedNode, audience: object, reason: str
) -> None:
    async with relay.end(node) as end:
        await end.answer_challenge(token={"aud": audience})
        assert await end.until_closed() == (4001, [])
    assert relay.refusals() == [("node_refused", HERE, reason, 1)]
    assert [known.connected for known in relay.hub.fleet.nodes_of(TENANT)] == [False]
