"""A node's session with its relay: announcing, commands, one-way frames and the end."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from kubelet.session.link import LinkState
from kubelet.session.relay_frames import LinkEvent
from schemas.canonical import jcs
from schemas.frames import MAX_FRAME_BYTES, OneWayType
from schemas.session import CloseCode, DropReason
from tests.fakes.clock import FakeClock
from tests.fakes.frames import PAYLOADS, frame_text, message_id
from tests.fakes.node import announce_again
from tests.fakes.node_link import BOUND_S, HOUR_MS, REJECTION, Rig
from tests.fakes.polling import until
from tests.fakes.signer import NOW_MS, TTL_MS
from tests.fakes.view_stage import WorkCounts

pytestmark = pytest.mark.integration


async def test_after_the_welcome_come_the_manifest_and_a_heartbeat(rig: Rig) -> None:
    async with rig.running():
        end = await rig.relay.next()
        await end.admit()
        announce, heartbeat = await end.receive(), await end.receive()
        manifest = rig.link.announcer.current
        assert manifest is not None
        assert (announce.type, jcs(announce.payload)) == ("announce", manifest.wire)
        assert heartbeat.type == "heartbeat"
        assert heartbeat.payload == {
            "manifest_etag": manifest.etag,
            "expires_at_ms": manifest.expires_at_ms,
            "inflight": 0,
        }
        assert rig.link.state is LinkState.OPEN
        await end.send("announce_ack", answers=announce.msg_id)
        await rig.until_state(LinkState.ANNOUNCED)
        assert rig.link.announcer.published == manifest


async def test_a_manifest_is_parsed_encoded_and_validated_once(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = WorkCounts(monkeypatch)
    async with rig.running():
        end = await rig.relay.next()
        await end.admit()
        # Before it is sent: the relay that is played here parses as well.
        assert work.counts == {"parsed": 1, "encoded": 1, "validated": 1}
        announce = await end.receive("announce")
        assert rig.link.announcer.current is not None
        assert announce.wire == rig.link.announcer.current.wire
    assert work.counts == {"parsed": 2, "encoded": 1, "validated": 1}


async def test_every_heartbeat_brings_a_newer_manifest(rig: Rig, clock: FakeClock) -> None:
    rig.worker.may_end.clear()
    async with rig.running():
        end = await rig.opened()
        await end.send("cmd")
        await asyncio.wait_for(rig.worker.begun.get(), BOUND_S)
        clock.advance(60_000)
        rig.link.announcer.follow_interval(30)
        assert (await end.receive("announce")).payload["issued_at_ms"] == NOW_MS + 60_000
        beat = await end.receive("heartbeat")
        assert (beat.payload["expires_at_ms"], beat.payload["inflight"]) == (NOW_MS + 60_000 + TTL_MS, 1)


async def test_the_heart_beats_as_often_as_the_relay_asks(rig: Rig) -> None:
    async with rig.running():
        await rig.opened(heartbeat_interval_ms=5_000)
        assert (await rig.heartbeats.next()).seconds == 5.0


async def test_the_heart_beats_as_often_as_the_relay_asks_for_later(rig: Rig) -> None:
    async with rig.running():
        end = await rig.opened()
        announce_again(rig.link.announcer)
        beat = await end.receive("heartbeat")
        await end.send("heartbeat_ack", answers=beat.msg_id, heartbeat_interval_ms=5_000)
        while (await rig.heartbeats.next()).seconds != 5.0:
            pass


async def test_without_a_session_nothing_is_sent(rig: Rig) -> None:
    async with rig.running():
        manifest = rig.link.announcer.current
        assert manifest is not None
        assert await rig.link.send_manifest(manifest) is False
        end = await rig.relay.next()
        await end.challenge()
        await end.receive("auth")
        assert await rig.link.send_manifest(manifest) is False
    assert rig.link.announcer.published is None


async def test_other_kinds_than_the_relay_knows_are_not_announced_to_it(rig: Rig) -> None:
    told: list[Sequence[str] | None] = []

    def outdated(kinds: Sequence[str] | None) -> bool:
        told.append(kinds)
        rig.link.announcer.announce_now()
        return True

    rig.link.told_kinds = outdated
    async with rig.running():
        before = rig.link.announcer.current
        assert before is not None
        end = await rig.relay.next()
        await end.admit(kinds=["system.echo"])
        announce = await end.accept()
        assert told == [["system.echo"]]
        assert announce.payload["issued_at_ms"] > before.issued_at_ms


async def test_a_relay_that_refuses_a_kind_is_announced_others_at_once(rig: Rig) -> None:
    refused: list[str] = []

    def others() -> bool:
        refused.append("kinds")
        return True

    rig.link.kinds_refused = others
    async with rig.running():
        end = await rig.relay.next()
        await end.admit()
        announce = await end.receive("announce")
        error = {**REJECTION, "code": "E_KIND_UNSUPPORTED"}
        await end.send_payload("announce_ack", {"ok": False, "error": error}, answers=announce.msg_id)
        await end.command()  # the refusal before it is handled
        assert refused == ["kinds"]


async def test_a_manifest_that_a_mark_has_passed_is_followed_by_a_newer_one_at_once(rig: Rig) -> None:
    async with rig.running():
        end = await rig.relay.next()
        await end.admit()
        announce = await end.receive("announce")
        refusal = {"ok": False, "error": REJECTION, "mark_issued_at_ms": NOW_MS + 70_000}
        await end.send_payload("announce_ack", refusal, answers=announce.msg_id)
        newer = await end.receive("announce")
        assert newer.payload["issued_at_ms"] == NOW_MS + 70_001
        assert rig.link.state is LinkState.OPEN
        await end.send("announce_ack", answers=newer.msg_id)
        await rig.until_state(LinkState.ANNOUNCED)
    line = rig.log.entries("relay rejects the manifest")[0]
    assert (line["level"], line["code"]) == ("error", "E_MANIFEST_INVALID")


@pytest.mark.parametrize(
    "mark",
    [
        pytest.param({}, id="without a mark"),
        pytest.param({"mark_issued_at_ms": NOW_MS - 1}, id="with a mark that it has passed"),
    ],
)
async def test_a_manifest_that_is_refused_for_another_reason_is_not_sent_again(
    rig: Rig, mark: Mapping[str, int]
) -> None:
    async with rig.running():
        end = await rig.opened()
        await rig.until_state(LinkState.ANNOUNCED)
        manifest = rig.link.announcer.current
        assert manifest is not None
        await rig.link.send_manifest(manifest)
        announce = await end.receive("announce")
        refusal = {"ok": False, "error": REJECTION, **mark}
        await end.send_payload("announce_ack", refusal, answers=announce.msg_id)
        await rig.until_state(LinkState.OPEN)
        await end.command()
        assert rig.link.announcer.current == manifest


async def test_a_command_is_answered_with_the_result(rig: Rig) -> None:
    async with rig.running():
        end = await rig.opened()
        answer = await end.command(arguments={"message": "hello"})
        assert answer.payload == {"ok": True, "result": {"message": "pong"}}
        assert await rig.worker.begun.get() == {"message": "hello"}


async def test_commands_run_side_by_side(rig: Rig) -> None:
    rig.worker.may_end.clear()
    async with rig.running():
        end = await rig.opened()
        sent = {await end.send("cmd") for _ in range(2)}
        for _ in sent:
            await asyncio.wait_for(rig.worker.begun.get(), BOUND_S)
        rig.worker.may_end.set()
        assert {(await end.receive("cmd_ack")).in_reply_to for _ in sent} == sent


async def test_a_command_without_a_waiting_caller_is_stopped(rig: Rig) -> None:
    rig.worker.may_end.clear()
    async with rig.running():
        end = await rig.opened()
        msg_id = await end.send("cmd")
        await asyncio.wait_for(rig.worker.begun.get(), BOUND_S)
        await end.send("cmd_cancel", answers=msg_id)
        await asyncio.wait_for(rig.worker.stopped.wait(), BOUND_S)
        # Its deadline would have stopped it too, with an answer.
        rig.worker.may_end.set()
        other = await end.send("cmd")
        assert (await end.receive("cmd_ack")).in_reply_to == other


@pytest.mark.parametrize(
    ("late_ms", "ok"),
    [
        pytest.param(0, True, id="at once"),
        pytest.param(1_000, True, id="with time left"),
        pytest.param(2_000, False, id="with none left"),
        pytest.param(HOUR_MS, False, id="an hour late"),
    ],
)
async def test_time_spent_on_the_way_counts(rig: Rig, late_ms: int, *, ok: bool) -> None:
    async with rig.running():
        end = await rig.opened()
        rig.ticks.advance(late_ms)
        answer = await end.command(deadline_ms=2_000, sent_at_ms=NOW_MS)
        assert answer.payload["ok"] is ok
        if not ok:
            assert answer.payload["error"]["code"] == "E_DEADLINE_EXCEEDED"
            assert rig.worker.begun.empty()


async def test_a_heartbeats_answer_shows_how_quick_the_way_can_be(rig: Rig) -> None:
    async with rig.running():
        end = await rig.relay.next()
        await end.admit(server_time_ms=NOW_MS - 5_000)  # the welcome was five seconds on its way
        await end.accept()
        beat = await end.receive("heartbeat")
        await end.send("heartbeat_ack", answers=beat.msg_id, server_time_ms=NOW_MS)
        answer = await end.command(deadline_ms=2_000, sent_at_ms=NOW_MS - 3_000)
        assert answer.payload["error"]["code"] == "E_DEADLINE_EXCEEDED"


async def test_a_clock_of_the_relay_that_was_set_back_is_believed_after_two_heartbeats(rig: Rig) -> None:
    async with rig.running():
        end = await rig.opened()
        for now_ms in (NOW_MS - HOUR_MS, NOW_MS - HOUR_MS + 60_000):
            announce_again(rig.link.announcer)
            beat = await end.receive("heartbeat")
            await end.send("heartbeat_ack", answers=beat.msg_id, server_time_ms=now_ms)
        assert (await end.command(sent_at_ms=NOW_MS - HOUR_MS + 60_000)).payload["ok"] is True


@pytest.mark.parametrize(("resumed", "ok"), [(True, False), (False, True)])
async def test_a_new_session_measures_the_way_anew(rig: Rig, *, resumed: bool, ok: bool) -> None:
    async with rig.running():
        end = await rig.opened()
        end.drop()
        (await rig.waits.next()).end()
        end = await rig.opened(resumed=resumed, server_time_ms=NOW_MS - HOUR_MS)
        answer = await end.command(sent_at_ms=NOW_MS - HOUR_MS)
        assert answer.payload["ok"] is ok


async def test_a_result_that_fits_no_frame_costs_an_error_and_not_the_connection(rig: Rig) -> None:
    rig.worker.result = {"message": "x" * MAX_FRAME_BYTES}
    async with rig.running():
        end = await rig.opened()
        msg_id = await end.send("cmd")
        for _ in range(2):
            answer = await end.receive("cmd_ack")
            assert answer.payload["error"]["code"] == "E_INTERNAL"
            await end.send("cmd", msg_id=msg_id)
        rig.worker.result = {"message": "pong"}
        await end.receive("cmd_ack")
        assert (await end.command()).payload["ok"] is True


async def test_a_relay_that_does_not_read_loses_the_node(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kubelet.session.channel._MOST_UNREAD_BYTES", 1 << 20)
    rig.worker.result = {"message": "y" * 200_000}
    async with rig.running():
        end = await rig.opened()
        end.socket.transport.pause_reading()
        with suppress(ConnectionClosed):
            for _ in range(100):
                await end.send("cmd", sent_at_ms=NOW_MS)
        await rig.waits.next()


async def test_a_node_ends_though_its_relay_does_not_read(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kubelet.session.link.CLOSE_TIMEOUT_S", 0.2)
    rig.worker.result = {"message": "y" * 200_000}
    async with rig.running() as link:
        end = await rig.opened()
        end.socket.transport.pause_reading()
        for _ in range(40):
            await end.send("cmd", sent_at_ms=NOW_MS)
        await until(lambda: rig.link.dispatcher.inflight > 0)
        link.cancel()
        await asyncio.wait_for(asyncio.wait([link]), 30)


async def test_a_command_right_behind_a_goodbye_is_not_begun(rig: Rig) -> None:
    async with rig.running():
        end = await rig.opened()
        command, bye = (end.session.send(type_, message_id(90), PAYLOADS[type_]) for type_ in ("cmd", "bye"))
        # One after the other without a turn of the event loop: they arrive together.
        await end.socket.send(bye)
        await end.socket.send(command)
        assert await end.until_closed() == CloseCode.PROTOCOL_VIOLATION
        assert rig.worker.begun.empty()


async def test_a_node_that_shuts_down_says_goodbye(rig: Rig) -> None:
    async with rig.running():
        end = await rig.opened()
    bye = await end.receive()
    assert (bye.type, bye.payload) == ("bye", {"reason": "shutting_down"})
    assert await end.until_closed() == CloseCode.NORMAL


async def test_a_node_that_shuts_down_in_the_handshake_just_goes(rig: Rig) -> None:
    async with rig.running():
        end = await rig.relay.next()
        await end.challenge()
        await end.receive("auth")
    assert (await end.rest())[0] == []


async def test_a_node_that_shuts_down_while_it_waits_is_gone_at_once(rig: Rig) -> None:
    async with rig.running() as task:
        (await rig.relay.next()).drop()
        await rig.waits.next()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, BOUND_S)


async def test_one_way_frames_of_the_relay_reach_their_handler_and_bad_ones_are_counted(rig: Rig) -> None:
    received: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()
    events: list[LinkEvent] = []
    frames = rig.link.frames
    frames.on_frame(OneWayType.TELEMETRY_LEASE, received.put_nowait)
    frames.on_link(events.append)
    async with rig.running():
        end = await rig.relay.next()
        await end.admit()
        await end.socket.send(frame_text("telemetry_lease", 900, ttl_ms=-1))
        await end.send("telemetry_lease")
        assert await asyncio.wait_for(received.get(), BOUND_S) == PAYLOADS["telemetry_lease"]
        assert frames.dropped == {DropReason.MALFORMED: 1}
        assert frames.send(OneWayType.TELEMETRY, PAYLOADS["telemetry"])
        assert (await end.receive("telemetry")).payload == PAYLOADS["telemetry"]
        end.drop()
        await rig.waits.next()
        assert events == [LinkEvent.CONNECTED, LinkEvent.LOST]
