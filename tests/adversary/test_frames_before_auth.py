"""Attacker: a stranger at the nodes' endpoint. Tried: to act as a node before it has proved to be one:
answers to calls, manifests, heartbeats, goodbyes, and frames larger than a stranger may send.

What must happen: 4009 at the first such frame (a goodbye: 4001, for who leaves has not proved anything), no
manifest believed, no call answered, a ``node_refused`` line.
"""

import asyncio
import json

import pytest

from relay.http.websocket_protocol import MAX_BYTES_BEFORE_ADMISSION
from schemas.frames import MAX_FRAME_BYTES_BEFORE_WELCOME
from tests.fakes.frames import frame_text
from tests.fakes.raw_websocket import until_cut, ws_frame
from tests.fakes.served_relay import HERE, ServedRelay, auth_for
from tests.fakes.signer import NODE_ID, NOW_MS, TENANT, SimulatedNode

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("type_", ["cmd_ack", "announce", "heartbeat", "auth"])
async def test_a_nodes_frames_before_authentication_end_the_connection(
    relay: ServedRelay, node: SimulatedNode, type_: str
) -> None:
    async with relay.end(node) as end:
        await end.receive("challenge")
        await end.send_raw(frame_text(type_, 9, answers=7))
        assert await end.until_closed() == (4009, [])
    assert relay.refusals() == [("node_refused", HERE, "protocol", 1)]
    assert relay.hub.fleet.nodes_of(TENANT) == []


async def test_a_peer_that_says_bye_before_authentication_is_closed(
    relay: ServedRelay, node: SimulatedNode
) -> None:
    async with relay.end(node) as end:
        await end.receive("challenge")
        await end.send_raw(frame_text("bye"))
        assert await end.until_closed() == (4001, [])
    assert relay.refusals() == [("node_refused", HERE, "no_auth", 1)]


async def test_a_manifest_before_auth_is_not_believed_even_if_it_is_good(
    relay: ServedRelay, node: SimulatedNode
) -> None:
    async with relay.end(node) as end:
        await end.receive("challenge")
        frame = {"type": "announce", "msg_id": "0" * 26, "payload": json.loads(node.manifest())}
        await end.send_raw(json.dumps(frame))
        assert await end.until_closed() == (4009, [])
    assert relay.hub.fleet.nodes_of(TENANT) == []


async def test_a_call_cannot_be_answered_before_auth(relay: ServedRelay, node: SimulatedNode) -> None:
    async with relay.session(node) as end, relay.end(node) as stranger:
        call = asyncio.create_task(relay.call(f"sysecho.{NODE_ID}.echo.invoke"))
        command = await end.receive("cmd")
        await stranger.receive("challenge")
        ack = json.loads(frame_text("cmd_ack", 9)) | {"in_reply_to": command.msg_id}
        await stranger.send_raw(json.dumps(ack))
        assert await stranger.until_closed() == (4009, [])
        await end.acknowledge(command, {"message": "ping", "received_at_ms": NOW_MS, "node_id": NODE_ID})
        result = (await call).json()["result"]["structuredContent"]
        assert result == {"message": "ping", "received_at_ms": NOW_MS, "node_id": NODE_ID}
    assert relay.refusals() == [("node_refused", HERE, "protocol", 1)]


async def test_a_frame_over_8_kib_admits_no_node_even_if_it_is_good(
    relay: ServedRelay, node: SimulatedNode
) -> None:
    async with relay.end(node) as end:
        challenge = await end.receive("challenge")
        frame = {
            "type": "auth",
            "msg_id": "0" * 26,
            "in_reply_to": challenge.msg_id,
            "payload": auth_for(node, challenge),
        }
        await end.send_raw(json.dumps(frame).ljust(MAX_FRAME_BYTES_BEFORE_WELCOME + 1))
        assert await end.until_closed() == (4009, [])
    assert relay.refusals() == [("node_refused", HERE, "protocol", 1)]


async def test_a_peer_that_sends_too_much_before_authentication_is_cut_off(relay: ServedRelay) -> None:
    reader, writer = await relay.upgraded()
    # Announced as one frame of a mebibyte: it need not end to be too much.
    writer.write(ws_frame(bytes(1 << 20))[: MAX_BYTES_BEFORE_ADMISSION + 64])
    assert await until_cut(reader, writer) is None
    await relay.hub.lines.until("node refused")
    assert relay.refusals() == [("node_refused", HERE, "flooded", 1)]
