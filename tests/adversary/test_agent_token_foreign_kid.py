"""Attacker: the owner of another key. Tried: a perfect token, signed with it, under its own ``kid``,
under the relay's, and under one that looks like a path or a statement to code that looks it up
carelessly.

What must happen: 401, nothing called, a ``token_refused`` line that says which of it was wrong.
"""

from typing import Any

import pytest

from tests.fakes.forged import RELAY_KEY, agent_token, kid_of
from tests.fakes.served_relay import HERE, ServedRelay
from tests.fakes.signer import ABSENT, NODE_ID, key_named

pytestmark = pytest.mark.asyncio(loop_scope="module")

ATTACKERS_KEY = key_named("an attacker's own")


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
    token = agent_token(relay.hub, header={"kid": kid}, key=ATTACKERS_KEY)
    reply = await relay.call(f"sysecho.{NODE_ID}.echo.invoke", token)
    assert reply.status == 401
    assert relay.refusals() == [("token_refused", HERE, reason, 1)]
    assert relay.calls() == []


async def test_a_nodes_key_signs_no_agents_token(relay: ServedRelay) -> None:
    node = relay.hub.ca.issue()
    token = agent_token(relay.hub, header={"kid": node.kid}, key=node.key)
    assert (await relay.mcp("tools/list", token=token)).status == 401
    assert relay.refusals() == [("token_refused", HERE, "unknown_key", 1)]
