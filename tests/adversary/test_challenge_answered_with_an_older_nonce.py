"""Attacker: one who has recorded a node's answers (a stolen disk of a proxy, a rogue relay of
yesterday). Tried: an answer with the nonce of an earlier challenge, of a connection that is open beside
it, of no challenge; and the whole recorded ``auth`` of a session that was opened with it.

What must happen: 4001, no session, a ``node_refused`` line.
"""

import pytest

from tests.fakes.served_relay import HERE, ServedRelay, auth_for
from tests.fakes.signer import TENANT, SimulatedNode

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def nonce_of_before(relay: ServedRelay, node: SimulatedNode) -> str:
    async with relay.end(node) as earlier:
        nonce: str = (await earlier.receive("challenge")).payload["nonce"]
    await relay.hub.lines.until("node refused")
    return nonce


async def test_an_older_nonce_is_refused(relay: ServedRelay, node: SimulatedNode) -> None:
    older = await nonce_of_before(relay, node)
    async with relay.end(node) as end:
        await end.answer_challenge(token={"nonce": older})
        assert await end.until_closed() == (4001, [])
    assert relay.refusals() == [
        ("node_refused", HERE, "gone", 1),
        ("node_refused", HERE, "token_nonce", 1),
    ]


async def test_the_nonce_of_another_connection_is_refused(relay: ServedRelay, node: SimulatedNode) -> None:
    async with relay.end(node) as beside, relay.end(node) as end:
        challenge = await beside.receive("challenge")
        await end.answer_challenge(token={"nonce": challenge.payload["nonce"]})
        assert await end.until_closed() == (4001, [])
        assert relay.refusals() == [("node_refused", HERE, "token_nonce", 1)]
        assert relay.hub.fleet.nodes_of(TENANT)[0].connected is False


@pytest.mark.parametrize("nonce", ["A" * 43, "\x00" * 43, "", None, "n" * 42])
async def test_a_nonce_of_no_challenge_is_refused(
    relay: ServedRelay, node: SimulatedNode, nonce: str | None
) -> None:
    reason = "token_nonce" if nonce == "A" * 43 else "token_claims"
    async with relay.end(node) as end:
        await end.answer_challenge(token={"nonce": nonce})
        assert await end.until_closed() == (4001, [])
    assert relay.refusals() == [("node_refused", HERE, reason, 1)]


async def test_a_recorded_answer_opens_no_second_session(relay: ServedRelay, node: SimulatedNode) -> None:
    async with relay.end(node) as owner:
        challenge = await owner.receive("challenge")
        recorded = auth_for(node, challenge)
        await owner.send("auth", recorded, challenge.msg_id)
        await owner.receive("welcome")
        async with relay.end(node) as thief:
            again = await thief.receive("challenge")
            await thief.send("auth", recorded, again.msg_id)
            assert await thief.until_closed() == (4001, [])
        assert relay.refusals() == [("node_refused", HERE, "token_nonce", 1)]
        assert relay.hub.fleet.nodes_of(TENANT)[0].connected is True
