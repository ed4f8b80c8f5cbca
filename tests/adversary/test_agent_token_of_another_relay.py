"""Attacker: the operator of another relay, or an agent that has a token there. Tried: a token of a relay that
signs with the same key (a copy of the state directory) under another URL, and one of a relay with its own
key.

What must happen: 401, nothing called, a ``token_refused`` line.
"""

from typing import Any

import pytest

from schemas.addresses import mcp_url
from tests.fakes.forged import agent_token, kid_of
from tests.fakes.served_relay import HERE, ServedRelay
from tests.fakes.signer import NODE_ID, key_named

pytestmark = pytest.mark.asyncio(loop_scope="module")

OTHER = "https://staging.example"
OTHER_KEY = key_named("another relay's token key")
ECHO_NAME = f"sysecho.{NODE_ID}.echo.invoke"


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        pytest.param({"iss": OTHER, "aud": mcp_url(OTHER)}, "audience", id="for the other"),
        pytest.param({"aud": mcp_url(OTHER)}, "audience", id="of this one for the other"),
        pytest.param({"iss": OTHER}, "issuer", id="of the other for this one"),
    ],
)
async def test_a_token_of_a_relay_with_the_same_key_is_refused(
    relay: ServedRelay, claims: dict[str, Any], reason: str
) -> None:
    reply = await relay.call(ECHO_NAME, agent_token(relay.hub, **claims))
    assert reply.status == 401
    assert relay.refusals() == [("token_refused", HERE, reason, 1)]
    assert relay.calls() == []


async def test_a_token_of_a_relay_with_another_key_is_refused(relay: ServedRelay) -> None:
    token = agent_token(relay.hub, header={"kid": kid_of(OTHER_KEY)}, key=OTHER_KEY)
    assert (await relay.call(ECHO_NAME, token)).status == 401
    assert relay.refusals() == [("token_refused", HERE, "unknown_key", 1)]
