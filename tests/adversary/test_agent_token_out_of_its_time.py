"""Attacker: one who found a token, or has one from an issuer whose clock is wrong. Tried: tokens that
have expired, that are not valid yet, that live backwards, and one that expires while it is being used.

What must happen: 401, nothing called, a ``token_refused`` line; what was verified before counts for nothing.
"""

import pytest

from schemas.manifest import MAX_FUTURE_MS
from schemas.tokens import CLOCK_LEEWAY_S
from tests.fakes.forged import NOW_S, agent_token
from tests.fakes.served_relay import HERE, ServedRelay
from tests.fakes.signer import NODE_ID

pytestmark = pytest.mark.asyncio(loop_scope="module")

ECHO_NAME = f"sysecho.{NODE_ID}.echo.invoke"


@pytest.mark.parametrize(
    ("iat", "exp", "reason"),
    [
        pytest.param(NOW_S - 3600, NOW_S - CLOCK_LEEWAY_S, "expired", id="expired"),
        pytest.param(0, 1, "expired", id="of 1970"),
        pytest.param(NOW_S - 60, NOW_S, "expired", id="expired this second"),
        pytest.param(NOW_S + MAX_FUTURE_MS // 1000 + 1, NOW_S + 3600, "not_yet", id="from the future"),
        pytest.param(NOW_S, NOW_S, "not_yet", id="of no length"),
        pytest.param(NOW_S + 3, NOW_S + 2, "not_yet", id="backwards"),
    ],
)
async def test_a_token_out_of_its_time_is_refused(
    relay: ServedRelay, iat: int, exp: int, reason: str
) -> None:
    reply = await relay.call(ECHO_NAME, agent_token(relay.hub, iat=iat, exp=exp))
    assert reply.status == 401
    assert relay.refusals() == [("token_refused", HERE, reason, 1)]
    assert relay.calls() == []


async def test_a_token_that_expires_while_it_is_used_is_refused_from_then_on(relay: ServedRelay) -> None:
    token = agent_token(relay.hub, exp=NOW_S + 60)
    assert (await relay.mcp("tools/list", token=token)).status == 200
    relay.hub.clock.advance(60_000)
    for _ in range(3):
        assert (await relay.mcp("tools/list", token=token)).status == 401
    assert relay.refusals() == [("token_refused", HERE, "expired", 3)]
