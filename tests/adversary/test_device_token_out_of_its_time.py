"""Attacker: the holder of a node's token, or of its key for a moment. Tried: tokens that live
longer than a minute, so that they can be hoarded, and tokens of another time.

What must happen: 4001, no session, a ``node_refused`` line.
"""

import pytest

from schemas.tokens import CLOCK_LEEWAY_S
from tests.fakes.forged import NOW_S
from tests.fakes.served_relay import HERE, ServedRelay, auth_for
from tests.fakes.signer import SimulatedNode

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize(
    ("iat", "exp", "reason"),
    [
        pytest.param(NOW_S, NOW_S + 61, "token_life", id="a second too long"),
        pytest.param(NOW_S - 1, NOW_S + 60, "token_life", id="too long from before"),
        pytest.param(NOW_S, NOW_S + 10**9, "token_life", id="for thirty years"),
        pytest.param(NOW_S - 60, NOW_S - CLOCK_LEEWAY_S, "token_expired", id="expired"),
        pytest.param(0, 60, "token_expired", id="of 1970"),
        pytest.param(NOW_S + CLOCK_LEEWAY_S + 1, NOW_S + 60, "token_not_yet", id="from the future"),
        pytest.param(NOW_S, NOW_S, "token_not_yet", id="of no length"),
        pytest.param(NOW_S + 2, NOW_S + 1, "token_not_yet", id="backwards"),
        pytest.param(-1, NOW_S + 30, "token_claims", id="before all time"),
        pytest.param(NOW_S, float(NOW_S) + 0.5, "token_claims", id="half a second"),
        pytest.param(NOW_S, 2**53 - 1, "token_life", id="until the end of all time"),
        pytest.param(NOW_S, 2**53, "token_malformed", id="and beyond"),
    ],
)
async def test_a_token_out_of_its_time_admits_no_node(
    relay: ServedRelay, node: SimulatedNode, iat: float, exp: float, reason: str
) -> None:
    async with relay.end(node) as end:
        await end.answer_challenge(token={"iat": iat, "exp": exp})
        assert await end.until_closed() == (4001, [])
    assert relay.refusals() == [("node_refused", HERE, reason, 1)]


async def test_a_good_token_that_comes_a_minute_late_admits_no_node(
    relay: ServedRelay, node: SimulatedNode
) -> None:
    async with relay.end(node) as end:
        challenge = await end.receive("challenge")
        relay.hub.clock.advance(60_000 + CLOCK_LEEWAY_S * 1000)
        await end.send("auth", auth_for(node, challenge), challenge.msg_id)
        assert await end.until_closed() == (4001, [])
    assert relay.refusals() == [("node_refused", HERE, "token_expired", 1)]
