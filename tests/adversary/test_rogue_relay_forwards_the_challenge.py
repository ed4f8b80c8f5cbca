"""Attacker: a rogue relay that a node was configured with, with a connection of its own to the real relay.
Tried: it passes the real relay's challenge on to the node, to pass the node's answer back and be the node;
once as it came, and once under its own name, which is the only name that the node answers to.

What must happen: to the challenge of another name, not a byte but a close leaves the node, and no token. What
the node says to the rogue's own name opens nothing at the real relay: 4001 and a ``node_refused`` line.
"""

from typing import Any

import pytest

from kubelet.session.link import LinkState
from schemas.frames import Frame, FrameReader
from schemas.registry import SchemaRegistry
from tests.fakes.environment import PUBLIC_URL
from tests.fakes.linked_node import LinkedNode
from tests.fakes.played_relay import PlayedRelay
from tests.fakes.served_relay import HERE, ServedRelay
from tests.fakes.signer import TENANT, SimulatedNode

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize(
    "audience",
    [
        pytest.param(PUBLIC_URL, id="the real relay's"),
        pytest.param("{own}/", id="its own and a slash"),
        pytest.param("{own}@relay.example", id="both at once"),
        pytest.param("https://RELAY.EXAMPLE", id="capitals"),
    ],
)
async def test_a_challenge_of_another_name_gets_no_answer(
    relay: ServedRelay, node: SimulatedNode, registry: SchemaRegistry, audience: str
) -> None:
    async with relay.end(node) as to_the_real_relay, PlayedRelay(FrameReader(registry)).running() as rogue:
        challenge = await to_the_real_relay.receive("challenge")
        async with LinkedNode.running(node, rogue.url, registry) as victim:
            end = await rogue.next()
            forwarded = {**challenge.payload, "audience": audience.format(own=rogue.url)}
            await end.send_payload("challenge", forwarded, msg_id=challenge.msg_id)
            assert await end.rest() == ([], 1000)
            await victim.until(LinkState.WRONG_AUDIENCE)
            assert victim.log.entries("relay names another audience")


async def forwarded_answer(node: SimulatedNode, registry: SchemaRegistry, challenge: Frame) -> dict[str, Any]:
    """Return what ``node`` answers to a rogue relay that puts its own name on ``challenge``."""
    async with (
        PlayedRelay(FrameReader(registry)).running() as rogue,
        LinkedNode.running(node, rogue.url, registry),
    ):
        end = await rogue.next()
        await end.send_payload("challenge", {**challenge.payload, "audience": rogue.url})
        return dict((await end.receive("auth")).payload)


async def test_an_answer_to_the_rogues_own_name_opens_nothing_at_the_real_relay(
    relay: ServedRelay, node: SimulatedNode, registry: SchemaRegistry
) -> None:
    async with relay.end(node) as to_the_real_relay:
        challenge = await to_the_real_relay.receive("challenge")
        answer = await forwarded_answer(node, registry, challenge)
        await to_the_real_relay.send("auth", answer, challenge.msg_id)
        assert await to_the_real_relay.until_closed() == (4001, [])
    assert relay.refusals() == [("node_refused", HERE, "token_audience", 1)]
    assert [known.connected for known in relay.hub.nodes_of(TENANT)] == [False]
