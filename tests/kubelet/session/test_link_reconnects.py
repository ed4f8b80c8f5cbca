"""How a node comes back: its session resumed, and the waits in between."""

import asyncio
import gc

import pytest

import kubelet.session.link
from kubelet.session.channel import MeteredConnection
from kubelet.session.link import LinkState
from schemas.session import CloseCode
from tests.fakes.node_link import BOUND_S, FIRST_WAIT_S, SUPERSEDED_WAIT_S, Rig, World
from tests.fakes.played_relay import SESSION_ID, PlayedRelay

pytestmark = pytest.mark.integration


async def test_after_a_lost_connection_the_same_process_asks_for_its_session(rig: Rig) -> None:
    async with rig.running():
        end = await rig.relay.next()
        first = await end.admit()
        await end.accept()
        await rig.until_state(LinkState.ANNOUNCED)
        end.drop()
        wait = await rig.waits.next()
        assert (wait.seconds, rig.link.state) == (FIRST_WAIT_S, LinkState.CONNECTING)
        wait.end()
        second = await (await rig.relay.next()).admit(resumed=True)
    assert "resume" not in first.payload
    assert second.payload["resume"] == SESSION_ID
    assert second.payload["boot_id"] == first.payload["boot_id"]


async def test_a_lost_connection_does_not_wait_for_a_garbage_collection(rig: Rig) -> None:
    """A collection of old objects comes seldom on a board, and each connection has buffers of TLS."""
    gc.collect()
    gc.disable()
    try:
        async with rig.running():
            for _ in range(3):
                end = await rig.opened()
                await end.command()
                end.drop()
                (await rig.waits.next()).end()
            await rig.relay.next()
            assert sum(type(each) is MeteredConnection for each in gc.get_objects()) <= 1
    finally:
        gc.enable()


async def test_another_process_is_told_apart_by_its_boot_id(world: World, relay: PlayedRelay) -> None:
    boots = set()
    for _ in range(2):
        rig = world.rig(relay)
        async with rig.running():
            boots.add((await (await relay.next()).admit()).payload["boot_id"])
    assert len(boots) == 2


async def test_an_answer_that_the_lost_connection_swallowed_is_given_again(rig: Rig) -> None:
    rig.worker.may_end.clear()
    async with rig.running():
        end = await rig.opened()
        msg_id = await end.send("cmd")
        await asyncio.wait_for(rig.worker.begun.get(), BOUND_S)
        end.drop()
        wait = await rig.waits.next()
        rig.worker.may_end.set()
        wait.end()
        end = await rig.opened(resumed=True)
        answer = await end.command(msg_id=msg_id)
        assert answer.payload == {"ok": True, "result": {"message": "pong"}}
        assert rig.worker.begun.empty()


async def test_a_command_that_survives_its_connection_is_answered_over_the_next(rig: Rig) -> None:
    rig.worker.may_end.clear()
    async with rig.running():
        end = await rig.opened()
        msg_id = await end.send("cmd")
        await asyncio.wait_for(rig.worker.begun.get(), BOUND_S)
        end.drop()
        (await rig.waits.next()).end()
        end = await rig.opened(resumed=True)
        await end.send("cmd", msg_id=msg_id)
        rig.worker.may_end.set()
        assert (await end.receive("cmd_ack")).payload["ok"] is True
        assert rig.worker.begun.empty()


async def test_what_the_relay_has_answered_lately_may_come_again_at_once(rig: Rig) -> None:
    async with rig.running():
        (await rig.opened()).drop()
        (await rig.waits.next()).end()
        end = await rig.opened(resumed=True)
        for _ in range(500):
            await end.send("caller_tool_result", result="x" * 20_000)
        assert (await end.command()).payload["ok"] is True


CLOSES = [
    pytest.param(CloseCode.AUTH_FAILED, LinkState.REFUSED, 0, id="4001 auth failed"),
    pytest.param(CloseCode.SUPERSEDED, LinkState.SUPERSEDED, SUPERSEDED_WAIT_S, id="4008 superseded"),
    pytest.param(CloseCode.PROTOCOL_VIOLATION, LinkState.CONNECTING, 0, id="4009 protocol violation"),
    pytest.param(CloseCode.MANIFEST_REJECTED, LinkState.CONNECTING, 0, id="4010 manifest rejected"),
    pytest.param(CloseCode.OVER_CAPACITY, LinkState.CONNECTING, 0, id="4013 over capacity"),
    pytest.param(CloseCode.GOING_AWAY, LinkState.CONNECTING, 0, id="1001 going away"),
    pytest.param(CloseCode.NORMAL, LinkState.CONNECTING, 0, id="1000 normal"),
]


@pytest.mark.parametrize("welcome", [False, True], ids=["in the handshake", "later"])
@pytest.mark.parametrize("bye", [False, True], ids=["without a word", "after a bye"])
@pytest.mark.parametrize(("code", "state", "at_least_s"), CLOSES)
async def test_what_the_relay_ends_leaves_a_state_and_a_wait(  # noqa: PLR0913 - a table
    rig: Rig, code: CloseCode, state: LinkState, at_least_s: float, *, bye: bool, welcome: bool
) -> None:
    async with rig.running():
        if welcome:
            end = await rig.opened()
            await rig.until_state(LinkState.ANNOUNCED)
        else:
            end = await rig.relay.next()
            await end.challenge()
            await end.receive("auth")
        if bye:
            await end.send("bye")
        await end.socket.close(code)
        wait = await rig.waits.next()
        assert (rig.link.state, wait.seconds) == (state, at_least_s + FIRST_WAIT_S)
        # And it comes back.
        wait.end()
        await rig.opened()
        await rig.until_state(LinkState.ANNOUNCED)


@pytest.mark.parametrize("bye", [False, True], ids=["without a word", "after a bye"])
@pytest.mark.parametrize("welcome", [False, True], ids=["in the handshake", "later"])
async def test_a_node_that_was_revoked_waits_for_an_operator(rig: Rig, *, welcome: bool, bye: bool) -> None:
    async with rig.running() as task:
        end = await rig.relay.next()
        if welcome:
            await end.admit()
        else:
            await end.challenge()
        if bye:
            await end.send("bye", reason="revoked")
        await end.socket.close(CloseCode.REVOKED)
        await asyncio.wait_for(task, BOUND_S)
        assert rig.link.state is LinkState.REVOKED


async def test_a_relay_that_asks_for_time_and_does_not_close_gets_it_too(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kubelet.session.link.CLOSE_TIMEOUT_S", 0.1)
    async with rig.running():
        end = await rig.opened()
        await end.send("bye", reason="over_capacity", retry_after_ms=7_000)
        assert (await rig.waits.next()).seconds >= 7


@pytest.mark.parametrize("welcome", [False, True], ids=["in the handshake", "later"])
async def test_a_relay_that_asks_for_time_gets_it_once(rig: Rig, *, welcome: bool) -> None:
    async with rig.running():
        end = await (rig.opened() if welcome else rig.relay.next())
        if not welcome:
            await end.challenge()
        await end.send("bye", reason="over_capacity", retry_after_ms=7_000)
        await end.socket.close(CloseCode.OVER_CAPACITY)
        wait = await rig.waits.next()
        assert wait.seconds == 7 + FIRST_WAIT_S
        wait.end()
        (await rig.relay.next()).drop()
        assert (await rig.waits.next()).seconds == FIRST_WAIT_S


async def test_a_superseded_node_that_is_asked_for_more_time_gives_more(rig: Rig) -> None:
    async with rig.running():
        end = await rig.opened()
        await end.send("bye", reason="superseded", retry_after_ms=600_000)
        await end.socket.close(CloseCode.SUPERSEDED)
        assert (await rig.waits.next()).seconds == 599 + FIRST_WAIT_S


async def test_of_two_machines_with_one_identity_each_comes_back_more_slowly_every_time(rig: Rig) -> None:
    async with rig.running():
        for held_ms, at_least_s in ((0, 300), (310_000, 599), (599_000, 599), (600_001, 300), (0, 599)):
            end = await rig.opened()
            await rig.until_state(LinkState.ANNOUNCED)
            rig.ticks.advance(held_ms)
            await end.socket.close(CloseCode.SUPERSEDED)
            wait = await rig.waits.next()
            assert wait.seconds == at_least_s + FIRST_WAIT_S
            wait.end()


async def test_a_relay_that_says_goodbye_and_stays_is_left(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubelet.session.link, "CLOSE_TIMEOUT_S", 0.01)
    async with rig.running():
        end = await rig.opened()
        await rig.until_state(LinkState.ANNOUNCED)
        await end.send("bye")
        assert (await rig.waits.next()).seconds == FIRST_WAIT_S
        assert rig.link.state is LinkState.CONNECTING
        assert await end.until_closed() is not None


async def test_waits_grow_until_a_manifest_is_accepted(rig: Rig) -> None:
    async with rig.running():
        for ceiling in (1, 2, 4):
            end = await rig.relay.next()
            await end.admit()  # a relay that takes the node in and throws it out again
            await end.socket.close(CloseCode.MANIFEST_REJECTED)
            wait = await rig.waits.next()
            assert wait.seconds == ceiling * FIRST_WAIT_S
            wait.end()
        end = await rig.opened()
        await rig.until_state(LinkState.ANNOUNCED)
        end.drop()
        assert (await rig.waits.next()).seconds == FIRST_WAIT_S
