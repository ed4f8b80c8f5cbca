"""Attacker: any client that can reach ``/mcp``. Tried: tokens that ask not to be verified at all.

What must happen: 401 that challenges with ``invalid_token``, nothing listed or called, a ``token_refused``
line.
"""

import pytest

from tests.fakes.forged import RELAY_KEY, agent_claims, jws, kid_of
from tests.fakes.served_relay import HERE, ServedRelay

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("alg", ["none", "None", "NONE", "nOnE", "", None])
async def test_a_token_that_asks_not_to_be_verified_is_refused(relay: ServedRelay, alg: str | None) -> None:
    header = {"alg": alg, "kid": kid_of(RELAY_KEY), "typ": "JWT"}
    reply = await relay.mcp("tools/list", token=jws(header, agent_claims(relay.hub), lambda _data: b""))
    assert reply.status == 401
    assert reply.headers["www-authenticate"].startswith('Bearer error="invalid_token"')
    assert relay.refusals() == [("token_refused", HERE, "malformed", 1)]
    assert relay.calls() == []


async def test_a_good_header_over_no_signature_is_refused(relay: ServedRelay) -> None:
    header = {"alg": "EdDSA", "kid": kid_of(RELAY_KEY), "typ": "JWT"}
    reply = await relay.mcp("tools/list", token=jws(header, agent_claims(relay.hub), lambda _data: b""))
    assert reply.status == 401
    assert relay.refusals() == [("token_refused", HERE, "signature", 1)]
