"""Attacker: a stranger at the nodes' endpoint, a rogue relay that was given a node's token, or one who has
recorded a node's answers.

Tried: tokens for another audience, of another time or class, and with the nonce of another challenge; a
recorded ``auth``; and to act as a node before it has proved to be one: answers to calls, manifests,
heartbeats, goodbyes, bytes that are no text, and frames larger than a stranger may send.

What must happen: 4001 for a wrong proof, and for a goodbye, as who leaves has proved nothing; 4009 for any
other frame; no session, no manifest believed, no call answered, and a ``node_refused`` line.
"""

import asyncio
import json
from typing import Any

import pytest

from relay.http.websocket_protocol import MAX_BYTES_BEFORE_ADMISSION
from schemas.frames import MAX_FRAME_BYTES_BEFORE_WELCOME
from schemas.tokens import CLOCK_LEEWAY_S
from tests.fakes.environment import PUBLIC_URL
from tests.fakes.forged import NOW_S, agent_claims, agent_token, jws
from tests.fakes.frames import frame_text, message_id
from tests.fakes.raw_http import until_cut, ws_frame
from tests.fakes.served_relay import HERE, ServedRelay, auth_for
from tests.fakes.signer import NODE_ID, NOW_MS, TENANT, SimulatedNode

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def nonce_of_before(relay: ServedRelay, node: SimulatedNode) -> str:
    async with relay.end(node) as earlier:
        nonce: str = (await earlier.receive("challenge")).payload["nonce"]
    await relay.hub.lines.until("node refused")
    return nonce


# --- a wrong proof


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        pytest.param({"aud": "https://rogue.example"}, "token_audience", id="for a rogue relay"),
        pytest.param({"aud": f"{PUBLIC_URL}/"}, "token_audience", id="a slash more"),
        pytest.param({"aud": f"{PUBLIC_URL}/mcp"}, "token_audience", id="the agents' audience"),
        pytest.param({"aud": f"{PUBLIC_URL}:443"}, "token_audience", id="with its port"),
        pytest.param({"aud": PUBLIC_URL.upper()}, "token_audience", id="capitals"),
        pytest.param({"aud": "http://relay.example"}, "token_audience", id="in the clear"),
        pytest.param({"aud": [PUBLIC_URL]}, "token_claims", id="a list"),
        pytest.param({"aud": [PUBLIC_URL, "https://rogue.example"]}, "token_claims", id="a list of two"),
        pytest.param({"aud": ""}, "token_claims", id="for none"),
        pytest.param({"iat": NOW_S, "exp": NOW_S + 61}, "token_life", id="a second too long"),
        pytest.param({"iat": NOW_S - 1, "exp": NOW_S + 60}, "token_life", id="too long from before"),
        pytest.param({"iat": NOW_S, "exp": NOW_S + 10**9}, "token_life", id="for thirty years"),
        pytest.param({"iat": NOW_S - 60, "exp": NOW_S - CLOCK_LEEWAY_S}, "token_expired", id="expired"),
        pytest.param({"iat": 0, "exp": 60}, "token_expired", id="of 1970"),
        pytest.param(
            {"iat": NOW_S + CLOCK_LEEWAY_S + 1, "exp": NOW_S + 60}, "token_not_yet", id="from the future"
        ),
        pytest.param({"iat": NOW_S, "exp": NOW_S}, "token_not_yet", id="of no length"),
        pytest.param({"iat": NOW_S + 2, "exp": NOW_S + 1}, "token_not_yet", id="backwards"),
        pytest.param({"iat": -1, "exp": NOW_S + 30}, "token_claims", id="before all time"),
        pytest.param({"iat": NOW_S, "exp": float(NOW_S) + 0.5}, "token_claims", id="half a second"),
        pytest.param({"iat": NOW_S, "exp": 2**53 - 1}, "token_life", id="until the end of all time"),
        pytest.param({"iat": NOW_S, "exp": 2**53}, "token_malformed", id="and beyond"),
        pytest.param({"nonce": "A" * 43}, "token_nonce", id="a nonce of no challenge"),
        pytest.param({"nonce": "\x00" * 43}, "token_claims", id="a nonce of null bytes"),
        pytest.param({"nonce": ""}, "token_claims", id="an empty nonce"),
        pytest.param({"nonce": None}, "token_claims", id="no nonce"),
        pytest.param({"nonce": "n" * 42}, "token_claims", id="a short nonce"),
    ],
)
async def test_a_token_with_another_claim_admits_no_node(
    relay: ServedRelay, node: SimulatedNode, claims: dict[str, Any], reason: str
) -> None:
    async with relay.end(node) as end:
        await end.answer_challenge(token=claims)
        assert await end.until_closed() == (4001, [])
    assert relay.refusals() == [("node_refused", HERE, reason, 1)]
    assert [known.connected for known in relay.hub.nodes_of(TENANT)] == [False]


async def test_a_good_token_that_comes_a_minute_late_admits_no_node(
    relay: ServedRelay, node: SimulatedNode
) -> None:
    async with relay.end(node) as end:
        challenge = await end.receive("challenge")
        relay.hub.clock.advance(60_000 + CLOCK_LEEWAY_S * 1000)
        await end.send("auth", auth_for(node, challenge), challenge.msg_id)
        assert await end.until_closed() == (4001, [])
    assert relay.refusals() == [("node_refused", HERE, "token_expired", 1)]


@pytest.mark.parametrize(
    ("signed_by_the_node", "reason"), [(False, "token_unknown_key"), (True, "token_claims")]
)
async def test_an_agents_token_or_claims_admit_no_node(
    relay: ServedRelay, node: SimulatedNode, *, signed_by_the_node: bool, reason: str
) -> None:
    claims = agent_claims(relay.hub, aud=PUBLIC_URL, sub=NODE_ID, iss=NODE_ID)
    theirs = jws({"alg": "EdDSA", "kid": node.kid}, claims, node.sign)
    token = theirs if signed_by_the_node else agent_token(relay.hub)
    async with relay.end(node) as end:
        challenge = await end.receive("challenge")
        await end.send("auth", auth_for(node, challenge, token=token), challenge.msg_id)
        assert await end.until_closed() == (4001, [])
    assert relay.refusals() == [("node_refused", HERE, reason, 1)]


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
        assert relay.hub.nodes_of(TENANT)[0].connected is False


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
        assert relay.hub.nodes_of(TENANT)[0].connected is True


# --- no proof


@pytest.mark.parametrize(
    ("data", "code", "reason"),
    [
        *(
            pytest.param(frame_text(type_, 9, answers=7), 4009, "protocol", id=type_)
            for type_ in ("cmd_ack", "announce", "heartbeat", "auth")
        ),
        pytest.param(frame_text("bye"), 4001, "no_auth", id="bye"),
        pytest.param(frame_text("auth", 2, answers=1).encode(), 4009, "protocol", id="a binary message"),
    ],
)
async def test_a_frame_before_authentication_ends_the_connection(
    relay: ServedRelay, node: SimulatedNode, data: str | bytes, code: int, reason: str
) -> None:
    async with relay.end(node) as end:
        await end.receive("challenge")
        await end.send_raw(data)
        assert await end.until_closed() == (code, [])
    assert relay.refusals() == [("node_refused", HERE, reason, 1)]
    assert relay.hub.nodes_of(TENANT) == []


async def test_a_manifest_before_auth_is_not_believed_even_if_it_is_good(
    relay: ServedRelay, node: SimulatedNode
) -> None:
    async with relay.end(node) as end:
        await end.receive("challenge")
        frame = {"type": "announce", "msg_id": "0" * 26, "payload": json.loads(node.manifest())}
        await end.send_raw(json.dumps(frame))
        assert await end.until_closed() == (4009, [])
    assert relay.hub.nodes_of(TENANT) == []


async def test_a_call_cannot_be_answered_before_auth(relay: ServedRelay, node: SimulatedNode) -> None:
    async with relay.session(node) as end, relay.end(node) as stranger:
        call = asyncio.create_task(relay.call(f"sysecho.{NODE_ID}.echo.invoke"))
        command = await end.receive("cmd")
        await stranger.receive("challenge")
        ack = json.loads(frame_text("cmd_ack", 9)) | {"in_reply_to": command.msg_id}
        await stranger.send_raw(json.dumps(ack))
        assert await stranger.until_closed() == (4009, [])
        good = {"message": "ping", "received_at_ms": NOW_MS, "node_id": NODE_ID}
        await end.acknowledge(command, good)
        assert (await call).json()["result"]["structuredContent"] == good
    assert relay.refusals() == [("node_refused", HERE, "protocol", 1)]


@pytest.mark.parametrize("wrong", ["longer than 8 KiB", "to nothing that was asked"])
async def test_a_good_proof_in_another_frame_admits_no_node(
    relay: ServedRelay, node: SimulatedNode, wrong: str
) -> None:
    async with relay.end(node) as end:
        challenge = await end.receive("challenge")
        asked = wrong.startswith("longer")
        answers = challenge.msg_id if asked else message_id(7)
        frame = {"type": "auth", "msg_id": message_id(9), "in_reply_to": answers}
        text = json.dumps({**frame, "payload": auth_for(node, challenge)})
        await end.send_raw(text.ljust(MAX_FRAME_BYTES_BEFORE_WELCOME + 1) if asked else text)
        assert await end.until_closed() == (4009, [])
    assert relay.refusals() == [("node_refused", HERE, "protocol", 1)]


@pytest.mark.parametrize("payload", [b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"\xc0\x80"])
async def test_a_text_frame_that_is_no_text_is_closed(relay: ServedRelay, payload: bytes) -> None:
    reader, writer = await relay.upgraded()
    writer.write(ws_frame(b'{"type":"auth' + payload))
    assert await until_cut(reader, writer) == 1007
    await relay.hub.lines.until("node refused")
    assert relay.refusals() == [("node_refused", HERE, "gone", 1)]


async def test_a_peer_that_sends_too_much_before_authentication_is_cut_off(relay: ServedRelay) -> None:
    reader, writer = await relay.upgraded()
    # Announced as one frame of a mebibyte: it need not end to be too much.
    writer.write(ws_frame(bytes(1 << 20))[: MAX_BYTES_BEFORE_ADMISSION + 64])
    assert await until_cut(reader, writer) is None
    await relay.hub.lines.until("node refused")
    assert relay.refusals() == [("node_refused", HERE, "flooded", 1)]
