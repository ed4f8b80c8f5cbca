"""A node with several relays, and with relays that break the protocol."""

import asyncio

import pytest
from websockets.datastructures import Headers
from websockets.exceptions import InvalidStatus
from websockets.http11 import Response

from kubelet.session.channel import retry_after_s
from kubelet.session.link import LinkState
from schemas.canonical import jcs
from schemas.frames import MAX_FRAME_BYTES, MAX_FRAME_BYTES_BEFORE_WELCOME, FrameReader
from schemas.session import CloseCode
from tests.fakes.frames import frame_text, message_id
from tests.fakes.node_link import (
    BOUND_S,
    FIRST_WAIT_S,
    HOUR_MS,
    REJECTION,
    SUPERSEDED_WAIT_S,
    Rig,
    World,
    claims_of,
)
from tests.fakes.pauses import Pauses
from tests.fakes.played_relay import PlayedRelay, RelayEnd
from tests.fakes.signer import NOW_MS

pytestmark = pytest.mark.integration


async def end_all(waits: Pauses) -> None:
    """End every wait at once until cancelled."""
    while True:
        (await waits.next()).end()


async def from_the_first(rig: Rig, relay: PlayedRelay, second: PlayedRelay) -> tuple[RelayEnd, PlayedRelay]:
    """Return the first connection, and the relay that the node has not chosen."""
    arrivals = {asyncio.create_task(each.next()): each for each in (relay, second)}
    done, pending = await asyncio.wait(arrivals, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    [chosen], [left] = done, pending
    assert rig.link.state is LinkState.CONNECTING
    return chosen.result(), arrivals[left]


@pytest.mark.parametrize("status", [503, 502, 429, 404])
async def test_a_node_goes_on_to_the_next_relay_at_once_when_one_refuses(
    world: World, relay: PlayedRelay, second: PlayedRelay, status: int
) -> None:
    rig = world.rig(relay, second.url)
    relay.refusal = status
    async with rig.running():
        end = await second.next()
        await end.admit()
        await end.accept()
        await rig.until_state(LinkState.ANNOUNCED)
        assert str(rig.link.connected_to) == second.url
        assert end.socket.request is not None
        assert end.socket.request.headers["Host"] == relay.url.removeprefix("http://")
    assert rig.link.connected_to is None


async def test_a_node_goes_on_to_the_next_relay_when_one_is_away(
    world: World, second: PlayedRelay, reader: FrameReader
) -> None:
    async with PlayedRelay(reader).running() as gone:
        rig = world.rig(gone, second.url)
    second.audience = gone.url
    async with rig.running():
        await (await second.next()).admit()
        await rig.until_state(LinkState.OPEN)


@pytest.mark.parametrize("bye", [True, False])
async def test_a_relay_over_capacity_sends_its_nodes_to_the_next(
    world: World, relay: PlayedRelay, second: PlayedRelay, *, bye: bool
) -> None:
    rig = world.rig(relay, second.url)
    async with rig.running():
        end, other = await from_the_first(rig, relay, second)
        if bye:
            await end.send("bye", reason="over_capacity", retry_after_ms=60_000)
        await end.socket.close(CloseCode.OVER_CAPACITY if bye else 1013)
        assert "resume" not in (await (await other.next()).admit()).payload


async def test_the_wait_that_a_refusal_asks_for_is_kept(rig: Rig) -> None:
    rig.relay.refusal, rig.relay.refusal_headers = 503, {"Retry-After": "7"}
    async with rig.running():
        assert (await rig.waits.next()).seconds == 7 + FIRST_WAIT_S


@pytest.mark.parametrize("value", ["soon", "-1", "9" * 20, "Wed, 21 Oct 2026 07:28:00 GMT", ""])
async def test_a_wait_that_cannot_be_read_is_ignored(rig: Rig, value: str) -> None:
    rig.relay.refusal, rig.relay.refusal_headers = 503, {"Retry-After": value}
    async with rig.running():
        assert (await rig.waits.next()).seconds == FIRST_WAIT_S


def test_of_two_waits_in_one_answer_none_is_kept() -> None:
    headers = Headers([("Retry-After", "7"), ("Retry-After", "9")])
    assert retry_after_s(InvalidStatus(Response(503, "Busy", headers))) == 0.0


async def test_a_session_is_resumed_only_at_the_relay_that_holds_it(
    world: World, relay: PlayedRelay, second: PlayedRelay
) -> None:
    rig = world.rig(relay, second.url)
    async with rig.running():
        end, other = await from_the_first(rig, relay, second)
        await end.admit()
        await end.accept()
        await rig.until_state(LinkState.ANNOUNCED)
        first = relay if other is second else second
        first.refusal = 503
        end.drop()
        wait = await rig.waits.next()
        assert wait.seconds == FIRST_WAIT_S
        rig.ticks.advance(500)
        wait.end()
        elsewhere = await other.next()
        assert "resume" not in (await elsewhere.admit(session_id=message_id(77))).payload
        await elsewhere.accept()
        await rig.until_state(LinkState.ANNOUNCED)
        elsewhere.drop()
        wait = await rig.waits.next()
        rig.ticks.advance(500)
        wait.end()
        assert (await (await other.next()).admit(resumed=True)).payload["resume"] == message_id(77)


async def test_another_relay_does_not_change_the_audience(
    world: World, relay: PlayedRelay, second: PlayedRelay
) -> None:
    second.audience = second.url
    rig = world.rig(relay, second.url)
    relay.refusal = 503
    async with rig.running():
        end = await second.next()
        await end.challenge()
        assert await end.rest() == ([], CloseCode.NORMAL)
        assert rig.log.entries("relay names another audience")[0]["pinned"] == relay.url
        relay.refusal, second.refusal = None, 503
        ending = asyncio.create_task(end_all(rig.waits))
        auth = await (await relay.next()).admit()
        ending.cancel()
        await rig.until_state(LinkState.OPEN)
        assert claims_of(rig, auth.payload["token"])["aud"] == relay.url


async def test_a_superseded_node_waits_at_every_relay(
    world: World, relay: PlayedRelay, second: PlayedRelay
) -> None:
    rig = world.rig(relay, second.url)
    async with rig.running():
        end, _ = await from_the_first(rig, relay, second)
        await end.admit()
        await end.socket.close(CloseCode.SUPERSEDED)
        assert (await rig.waits.next()).seconds == SUPERSEDED_WAIT_S + FIRST_WAIT_S


async def test_a_node_that_one_relay_revokes_asks_no_other(
    world: World, relay: PlayedRelay, second: PlayedRelay
) -> None:
    rig = world.rig(relay, second.url)
    async with rig.running() as task:
        end, _ = await from_the_first(rig, relay, second)
        await end.socket.close(CloseCode.REVOKED)
        await asyncio.wait_for(task, BOUND_S)
        assert rig.link.state is LinkState.REVOKED


async def test_a_redirect_is_not_followed(rig: Rig, second: PlayedRelay) -> None:
    rig.relay.refusal, rig.relay.refusal_headers = 302, {"Location": second.url.replace("http", "ws")}
    async with rig.running():
        assert (await rig.waits.next()).seconds == FIRST_WAIT_S
    assert "302" in rig.log.entries("relay not reached")[0]["reason"]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("garbage", id="not a frame"),
        pytest.param('{"type":"shell","msg_id":"x","payload":{}}', id="an unknown type"),
        pytest.param(frame_text("challenge"), id="a second challenge"),
        pytest.param(frame_text("heartbeat"), id="a frame of the node's own"),
        pytest.param(frame_text("cmd", deadline_ms=0), id="a command that does not fit its document"),
        pytest.param(frame_text("cmd", deadline_ms=2000.5), id="half a millisecond"),
    ],
)
async def test_a_relay_that_breaks_the_protocol_is_left_with_4009(rig: Rig, text: str) -> None:
    async with rig.running():
        end = await rig.opened()
        await end.socket.send(text)
        assert await end.until_closed() == CloseCode.PROTOCOL_VIOLATION
        wait = await rig.waits.next()
        assert rig.link.state is LinkState.CONNECTING
        wait.end()
        assert (await (await rig.opened()).command()).payload["ok"] is True


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("garbage", id="not a frame"),
        pytest.param(frame_text("cmd"), id="a command before the welcome"),
        pytest.param(frame_text("welcome", answers=77), id="a welcome that answers nothing"),
        pytest.param(frame_text("challenge").ljust(MAX_FRAME_BYTES_BEFORE_WELCOME + 1), id="too large"),
    ],
)
async def test_a_handshake_that_breaks_the_protocol_is_left_with_4009(rig: Rig, text: str) -> None:
    async with rig.running():
        end = await rig.relay.next()
        await end.socket.send(text)
        assert await end.until_closed() == CloseCode.PROTOCOL_VIOLATION
        assert (await rig.waits.next()).seconds == FIRST_WAIT_S
        assert rig.worker.begun.empty()


async def test_a_frame_after_goodbye_is_left_with_4009(rig: Rig) -> None:
    async with rig.running():
        end = await rig.opened()
        await end.send("bye")
        await end.socket.send(frame_text("cmd"))
        assert await end.until_closed() == CloseCode.PROTOCOL_VIOLATION
        assert rig.worker.begun.empty()


async def test_a_frame_that_is_too_large_ends_the_session(rig: Rig) -> None:
    async with rig.running():
        end = await rig.opened()
        await end.socket.send(" " * (MAX_FRAME_BYTES + 1))
        assert await end.until_closed() == 1009
        (await rig.waits.next()).end()
        await rig.opened()


async def test_answers_to_nothing_are_dropped_and_the_session_goes_on(rig: Rig) -> None:
    async with rig.running():
        end = await rig.opened()
        await rig.until_state(LinkState.ANNOUNCED)
        refusal = {"ok": False, "error": REJECTION, "mark_issued_at_ms": NOW_MS + HOUR_MS}
        frame = {"type": "announce_ack", "msg_id": message_id(1), "in_reply_to": message_id(2)}
        await end.socket.send(jcs({**frame, "payload": refusal}).decode())
        assert (await end.command()).payload["ok"] is True
        assert rig.link.state is LinkState.ANNOUNCED


async def test_a_relay_that_never_says_a_word_is_left(world: World, relay: PlayedRelay) -> None:
    rig = world.rig(relay, timeout_s=0.05)
    async with rig.running():
        end = await relay.next()
        assert (await rig.waits.next()).seconds == FIRST_WAIT_S
        assert rig.link.state is LinkState.CONNECTING
        assert (await end.rest())[0] == []


@pytest.mark.parametrize("status", [403, 404, 503])
async def test_a_rejected_upgrade_is_retried(rig: Rig, status: int) -> None:
    rig.relay.refusal = status
    async with rig.running():
        wait = await rig.waits.next()
        assert wait.seconds == FIRST_WAIT_S
        wait.end()
        wait = await rig.waits.next()
        assert wait.seconds == 2 * FIRST_WAIT_S
        rig.relay.refusal = None
        wait.end()
        await rig.opened()
    assert str(status) in rig.log.entries("relay not reached")[0]["reason"]
