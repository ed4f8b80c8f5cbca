import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from websockets.datastructures import Headers
from websockets.exceptions import InvalidStatus
from websockets.http11 import Response

import kubelet.session.link
from kubelet.announce.announcer import Announcer
from kubelet.announce.signer import ManifestSigner
from kubelet.dispatch import Dispatcher
from kubelet.handlers.base import Handler
from kubelet.session.channel import retry_after_s
from kubelet.session.link import RelayLink
from kubelet.session.link_parts import LinkParts
from kubelet.session.link_state import LinkState
from kubelet.session.relay_addresses import RelayAddresses
from kubelet.session.relay_frames import LinkEvent, RelayFrames
from kubelet.session.renewal import Renewal
from schemas.canonical import jcs
from schemas.certificates import make_csr
from schemas.frame_types import FrameType
from schemas.frames import MAX_FRAME_BYTES, MAX_FRAME_BYTES_BEFORE_WELCOME, SUBPROTOCOL, FrameReader
from schemas.identity import certificates_in, kid_of
from schemas.identity_files import IdentityFiles
from schemas.kinds import KindRegistry
from schemas.process.logs import make_logger
from schemas.registry import SchemaRegistry
from schemas.session import CloseCode, DropReason
from schemas.tokens import DEVICE_REF, TokenVerifier
from schemas.ulids import UlidSource
from tests.fakes.chance import FixedChance
from tests.fakes.clock import FakeClock, hurried_ticks
from tests.fakes.frames import PAYLOADS, frame_text, message_id
from tests.fakes.lines import LogLines
from tests.fakes.node import announce_again, identity_of, write_identity
from tests.fakes.pauses import Pauses
from tests.fakes.played_relay import SESSION_ID, PlayedRelay, RelayEnd
from tests.fakes.signer import DAY_MS, ECHO, NODE_ID, NOW_MS, TTL_MS, SimulatedCa, SimulatedNode
from tests.fakes.work_counts import WorkCounts

pytestmark = pytest.mark.integration

BOUND_S = 10
HOUR_MS = 3_600_000
FIRST_WAIT_S = 0.5  # with every draw in the middle of its range
SUPERSEDED_WAIT_S = 300
REJECTION = {"code": "E_MANIFEST_INVALID", "message": "No.", "suggested_fix": "Wait."}


class EchoWorker(Handler):
    """Answers with what the test says, when it says so."""

    def __init__(self) -> None:
        self.result: dict[str, Any] = {"message": "pong"}
        self.begun: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.stopped = asyncio.Event()

    @property
    def capability(self) -> Mapping[str, Any]:
        return ECHO

    async def invoke(self, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        assert verb == "invoke"
        await self.begun.put(arguments)
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.stopped.set()
            raise
        return self.result


@dataclass
class Rig:
    """A link to a played relay, with all that it works with."""

    parts: LinkParts
    link: RelayLink
    relay: PlayedRelay
    worker: EchoWorker
    waits: Pauses
    heartbeats: Pauses
    ticks: FakeClock
    node: SimulatedNode
    log: LogLines

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        """Run the link and its announcer; the task is the link's."""
        self.parts.announcer.add_carrier(self.link.carry)
        announcer = asyncio.create_task(self.parts.announcer.run())
        await self.heartbeats.next()  # the first manifest is there before the first connection
        link = asyncio.create_task(self.link.run())
        try:
            yield link
        finally:
            for task in (link, announcer):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            await self.parts.dispatcher.close()

    async def opened(self, **welcome: Any) -> RelayEnd:
        """Return the next connection, announced and accepted."""
        end = await self.relay.next()
        await end.admit(**welcome)
        await end.accept()
        await end.receive("heartbeat")
        return end

    async def until_state(self, state: LinkState) -> None:
        """Wait until the node has handled what was sent before."""
        async with asyncio.timeout(BOUND_S):
            while self.link.state is not state:  # noqa: ASYNC110 - the link's state has no event
                await asyncio.sleep(0)


@dataclass
class World:
    """What every rig of a test shares."""

    node: SimulatedNode
    registry: SchemaRegistry
    kinds: KindRegistry
    reader: FrameReader
    clock: FakeClock
    log: LogLines

    def rig(self, relay: PlayedRelay, *others: str, timeout_s: float = BOUND_S) -> Rig:
        """Return a link to ``relay``, whose URL is the fleet's, and to ``others`` of its fleet."""
        relays = (relay.url, *others)
        logger = make_logger("kubelet", self.log)
        identity = identity_of(self.node)
        signer = ManifestSigner(
            identity=identity,
            hw_fingerprint={"algo": "blake3-256", "value": "ab" * 32, "sources": ["machine_id"]},
            capabilities=[ECHO],
            ttl_ms=TTL_MS,
            now_ms=self.clock,
            registry=self.registry,
            last_issued=None,
            log=logger,
            ticks_ms=hurried_ticks(),
        )
        worker, waits, heartbeats, ticks = EchoWorker(), Pauses(), Pauses(), FakeClock(1_000_000)
        chance = FixedChance(0.5)
        parts = LinkParts(
            identity=identity,
            public_url=relays[0],
            relays=RelayAddresses(relays, identity.node_id, chance, ticks),
            reader=self.reader,
            announcer=Announcer(signer, 60.0, chance, logger, sleep=heartbeats.sleep),
            dispatcher=Dispatcher(self.node.node_id, [worker], self.kinds, self.registry, logger),
            frames=RelayFrames(logger),
            ulids=UlidSource(self.clock, os.urandom),
            log=logger,
            ticks_ms=ticks,
            sleep=waits.sleep,
            handshake_timeout_s=timeout_s,
        )
        return Rig(parts, RelayLink(parts), relay, worker, waits, heartbeats, ticks, self.node, self.log)


@pytest.fixture
def world(  # noqa: PLR0913, PLR0917 - the fixtures that it bundles
    node: SimulatedNode,
    registry: SchemaRegistry,
    kinds: KindRegistry,
    reader: FrameReader,
    clock: FakeClock,
    log: LogLines,
) -> World:
    return World(node, registry, kinds, reader, clock, log)


@pytest.fixture
async def relay(reader: FrameReader) -> AsyncIterator[PlayedRelay]:
    async with PlayedRelay(reader).running() as relay:
        yield relay


@pytest.fixture
def rig(world: World, relay: PlayedRelay) -> Rig:
    return world.rig(relay)


def claims_of(rig: Rig, token: str, *, now_s: int = NOW_MS // 1000) -> dict[str, Any]:
    verifier = TokenVerifier(SchemaRegistry(), DEVICE_REF)
    keys = {rig.node.kid: rig.node.public_key}
    return verifier.verify(token, keys.get, audience=rig.relay.url, now_s=now_s)


# --- who it is


async def test_the_upgrade_contains_only_the_path_and_the_protocol(rig: Rig) -> None:
    async with rig.running():
        end = await rig.relay.next()
        request = end.socket.request
        assert request is not None
        assert request.path == "/devices/connect"
        assert end.socket.subprotocol == SUBPROTOCOL
        assert not {"authorization", "cookie", "user-agent", "sec-websocket-extensions"} & {
            name.lower() for name in request.headers
        }
        whole = str(request)
        assert NODE_ID not in whole


async def test_the_node_proves_who_it_is(rig: Rig) -> None:
    async with rig.running():
        end = await rig.relay.next()
        challenge = await end.challenge()
        auth = await end.receive()
    assert (auth.type, auth.in_reply_to) == ("auth", challenge)
    assert auth.payload["node_id"] == NODE_ID
    assert auth.payload["certificate"] == rig.node.leaf_pem + rig.node.root_pem
    assert "resume" not in auth.payload
    claims = claims_of(rig, auth.payload["token"])
    assert len(claims.pop("jti")) == 26
    assert claims == {
        "iss": NODE_ID,
        "sub": NODE_ID,
        "aud": rig.relay.url,
        "nonce": PAYLOADS["challenge"]["nonce"],
        "iat": NOW_MS // 1000,
        "exp": NOW_MS // 1000 + 60,
        "scope": "device:connect",
        "token_class": "device_runtime",
    }


@pytest.mark.parametrize("off_ms", [-HOUR_MS, HOUR_MS], ids=["an hour behind", "an hour ahead"])
async def test_a_token_lives_by_the_clock_of_the_relay(rig: Rig, off_ms: int) -> None:
    async with rig.running():
        end = await rig.relay.next()
        await end.challenge(server_time_ms=NOW_MS + off_ms)
        auth = await end.receive()
    claims = claims_of(rig, auth.payload["token"], now_s=(NOW_MS + off_ms) // 1000)
    assert claims["iat"] == (NOW_MS + off_ms) // 1000


async def test_every_challenge_is_answered_with_a_token_of_its_own(rig: Rig) -> None:
    tokens = []
    async with rig.running():
        for nonce in ("a" * 43, "b" * 43):
            end = await rig.relay.next()
            await end.challenge(nonce=nonce)
            tokens.append(claims_of(rig, (await end.receive()).payload["token"]))
            end.drop()
            (await rig.waits.next()).end()
    assert [claims["nonce"] for claims in tokens] == ["a" * 43, "b" * 43]
    assert tokens[0]["jti"] != tokens[1]["jti"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("https://relay.example", id="another host"),
        pytest.param("{url}/", id="a slash more"),
        pytest.param("{url}0", id="another port"),
        pytest.param("{url}.evil.example", id="ours as a prefix"),
        pytest.param("HTTP://127.0.0.1", id="another spelling"),
    ],
)
async def test_a_challenge_under_another_name_is_never_answered(rig: Rig, name: str) -> None:
    async with rig.running():
        end = await rig.relay.next()
        await end.challenge(audience=name.format(url=rig.relay.url))
        assert await end.rest() == ([], CloseCode.NORMAL)
        assert (await rig.waits.next()).seconds == FIRST_WAIT_S
        assert rig.link.state is LinkState.WRONG_AUDIENCE
        assert rig.log.entries("relay names another audience")[0]["pinned"] == rig.relay.url


# --- announcing


async def test_after_the_welcome_come_the_manifest_and_a_heartbeat(rig: Rig) -> None:
    async with rig.running():
        end = await rig.relay.next()
        await end.admit()
        announce, heartbeat = await end.receive(), await end.receive()
        manifest = rig.parts.announcer.current
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
        assert rig.parts.announcer.published == manifest


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
        assert rig.parts.announcer.current is not None
        assert announce.wire == rig.parts.announcer.current.wire
    assert work.counts == {"parsed": 2, "encoded": 1, "validated": 1}


async def test_every_heartbeat_brings_a_newer_manifest(rig: Rig, clock: FakeClock) -> None:
    rig.worker.may_end.clear()
    async with rig.running():
        end = await rig.opened()
        await end.send("cmd")
        await asyncio.wait_for(rig.worker.begun.get(), BOUND_S)
        clock.advance(60_000)
        rig.parts.announcer.follow_interval(30)
        assert (await end.receive("announce")).payload["issued_at_ms"] == NOW_MS + 60_000
        beat = await end.receive("heartbeat")
        assert (beat.payload["expires_at_ms"], beat.payload["inflight"]) == (NOW_MS + 60_000 + TTL_MS, 1)


async def test_the_heart_beats_as_often_as_the_relay_asks(rig: Rig) -> None:
    async with rig.running():
        await rig.opened(heartbeat_interval_ms=5_000)
        assert (await rig.heartbeats.next()).seconds == 5.0


async def test_without_a_session_nothing_is_carried(rig: Rig) -> None:
    async with rig.running():
        manifest = rig.parts.announcer.current
        assert manifest is not None
        assert await rig.link.carry(manifest) is False
        end = await rig.relay.next()
        await end.challenge()
        await end.receive("auth")
        assert await rig.link.carry(manifest) is False
    assert rig.parts.announcer.published is None


async def test_a_manifest_that_a_mark_has_overtaken_is_followed_by_a_newer_one_at_once(rig: Rig) -> None:
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
        manifest = rig.parts.announcer.current
        assert manifest is not None
        await rig.link.carry(manifest)
        announce = await end.receive("announce")
        refusal = {"ok": False, "error": REJECTION, **mark}
        await end.send_payload("announce_ack", refusal, answers=announce.msg_id)
        await rig.until_state(LinkState.OPEN)
        await end.command()
        assert rig.parts.announcer.current == manifest


# --- commands


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
            announce_again(rig.parts.announcer)
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


# --- coming back


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


CLOSES = [
    pytest.param(CloseCode.AUTH_FAILED, LinkState.REFUSED, 0, id="4001 auth failed"),
    pytest.param(CloseCode.SUPERSEDED, LinkState.SUPERSEDED, SUPERSEDED_WAIT_S, id="4008 superseded"),
    pytest.param(CloseCode.PROTOCOL_VIOLATION, LinkState.CONNECTING, 0, id="4009 protocol violation"),
    pytest.param(CloseCode.MANIFEST_REJECTED, LinkState.CONNECTING, 0, id="4010 manifest rejected"),
    pytest.param(CloseCode.OVER_CAPACITY, LinkState.CONNECTING, 0, id="4013 over capacity"),
    pytest.param(CloseCode.GOING_AWAY, LinkState.CONNECTING, 0, id="1001 going away"),
    pytest.param(CloseCode.NORMAL, LinkState.CONNECTING, 0, id="1000 normal"),
]


@pytest.mark.parametrize("bye", [False, True], ids=["without a word", "after a bye"])
@pytest.mark.parametrize(("code", "state", "at_least_s"), CLOSES)
async def test_a_session_that_the_relay_ends_leaves_a_state_and_a_wait(
    rig: Rig, code: CloseCode, state: LinkState, at_least_s: float, *, bye: bool
) -> None:
    async with rig.running():
        end = await rig.opened()
        await rig.until_state(LinkState.ANNOUNCED)
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
@pytest.mark.parametrize(("code", "state", "at_least_s"), CLOSES)
async def test_a_handshake_that_the_relay_ends_leaves_a_state_and_a_wait(
    rig: Rig, code: CloseCode, state: LinkState, at_least_s: float, *, bye: bool
) -> None:
    async with rig.running():
        end = await rig.relay.next()
        await end.challenge()
        await end.receive("auth")
        if bye:
            await end.send("bye")
        await end.socket.close(code)
        wait = await rig.waits.next()
        assert (rig.link.state, wait.seconds) == (state, at_least_s + FIRST_WAIT_S)


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


async def test_no_relay_sends_a_node_away_for_more_than_ten_minutes(rig: Rig) -> None:
    async with rig.running():
        end = await rig.opened()
        await end.send("bye", reason="over_capacity", retry_after_ms=86_400_000)
        await end.socket.close(CloseCode.OVER_CAPACITY)
        assert (await rig.waits.next()).seconds <= 600


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


# --- several relays


@pytest.fixture
async def second(relay: PlayedRelay, reader: FrameReader) -> AsyncIterator[PlayedRelay]:
    async with PlayedRelay(reader).running() as second:
        second.audience = relay.url
        yield second


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


# --- relays that misbehave


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


async def test_a_relay_that_is_not_there_is_tried_again(world: World, reader: FrameReader) -> None:
    async with PlayedRelay(reader).running() as relay:
        rig = world.rig(relay)
    async with rig.running():
        for ceiling in (1, 2, 4):
            wait = await rig.waits.next()
            assert (wait.seconds, rig.link.state) == (ceiling * FIRST_WAIT_S, LinkState.CONNECTING)
            wait.end()
    assert rig.log.entries("relay not reached")[0]["relay"] == relay.url


# --- another leaf


class Renewing:
    """What a node does with the leaf that it is given, played by a test.

    Attributes:
        due: whether it is time to ask.
    """

    def __init__(self, rig: Rig, files: IdentityFiles) -> None:
        self.due = True
        self.installed: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.renewed = asyncio.Event()
        self._files = files
        renewal = Renewal(
            rig.parts.identity, files, self._install, self.renewed.set, self._now_ms, rig.parts.log
        )
        rig.link = RelayLink(replace(rig.parts, renewal=renewal))

    def _now_ms(self) -> int:
        return NOW_MS + (80 * DAY_MS if self.due else 0)

    async def _install(self, payload: Mapping[str, Any]) -> str | None:
        await self.installed.put(payload)
        await self.may_end.wait()
        self._files.install(payload["certificate"], payload["roots"])
        return None


@pytest.fixture
def renewing(rig: Rig, tmp_path: Path) -> Renewing:
    files = write_identity(tmp_path / "state", rig.node)
    files.csr.write_text(make_csr(rig.node.key, NODE_ID))
    return Renewing(rig, files)


def new_leaf(rig: Rig, ca: SimulatedCa) -> dict[str, Any]:
    """Return the payload that brings the node another leaf."""
    return {"ok": True, "certificate": ca.issue(key=rig.node.key).leaf_pem, "roots": ca.root_pem}


async def test_a_leaf_that_is_due_is_asked_for_once_the_manifest_is_accepted(
    rig: Rig, renewing: Renewing, ca: SimulatedCa
) -> None:
    async with rig.running():
        end = await rig.relay.next()
        await end.admit()
        await end.receive("announce")
        announce = await end.receive("heartbeat")
        command = await end.send("cmd")
        assert (await end.receive()).in_reply_to == command  # nothing was asked before
        await end.send("heartbeat_ack", answers=announce.msg_id)
        asked = await end.receive("renew")
        assert asked.payload == {"csr": make_csr(rig.node.key, NODE_ID)}  # the relay speaks 1.0
        answer = new_leaf(rig, ca)
        await end.send_payload("renew_ack", answer, answers=asked.msg_id)
        await asyncio.wait_for(renewing.renewed.wait(), BOUND_S)
        assert renewing.installed.get_nowait() == answer
        assert rig.parts.identity.leaf_pem == answer["certificate"]
        assert rig.link.state is LinkState.OPEN


async def test_a_node_asks_when_its_manifest_is_acknowledged_too(rig: Rig, renewing: Renewing) -> None:
    assert renewing.due
    async with rig.running():
        end = await rig.opened()
        await end.receive("renew")


async def test_a_node_asks_once_and_not_with_every_heartbeat(rig: Rig, renewing: Renewing) -> None:
    assert renewing.due
    async with rig.running():
        end = await rig.opened()
        await end.receive("renew")
        for _ in range(3):
            announce_again(rig.parts.announcer)
            await end.accept()
            await end.send("heartbeat_ack", answers=(await end.receive()).msg_id)
        msg_id = await end.send("cmd")
        assert (await end.receive()).in_reply_to == msg_id  # and no second `renew` before it


async def test_a_leaf_that_is_not_due_is_not_asked_for(rig: Rig, renewing: Renewing) -> None:
    renewing.due = False
    async with rig.running():
        end = await rig.opened()
        msg_id = await end.send("cmd")
        assert (await end.receive()).in_reply_to == msg_id
        renewing.due = True
        announce_again(rig.parts.announcer)
        await end.accept()
        await end.receive("renew")


async def test_commands_go_on_while_a_leaf_is_put_in_place(
    rig: Rig, renewing: Renewing, ca: SimulatedCa
) -> None:
    renewing.may_end.clear()
    async with rig.running():
        end = await rig.opened()
        asked = await end.receive("renew")
        await end.send_payload("renew_ack", new_leaf(rig, ca), answers=asked.msg_id)
        await asyncio.wait_for(renewing.installed.get(), BOUND_S)
        assert (await end.command()).payload["ok"] is True
        assert not renewing.renewed.is_set()
        renewing.may_end.set()
        await asyncio.wait_for(renewing.renewed.wait(), BOUND_S)


async def test_a_relay_that_does_not_renew_keeps_its_node(rig: Rig, renewing: Renewing) -> None:
    async with rig.running():
        end = await rig.opened()
        asked = await end.receive("renew")
        await end.send_payload("renew_ack", {"ok": False, "error": REJECTION}, answers=asked.msg_id)
        await rig.log.until("relay does not renew the leaf")
        assert (await end.command()).payload["ok"] is True
        assert renewing.installed.empty()


async def test_a_leaf_that_was_not_asked_for_is_dropped(rig: Rig, ca: SimulatedCa) -> None:
    async with rig.running():
        end = await rig.opened()
        frame = {"type": "renew_ack", "msg_id": message_id(1), "in_reply_to": message_id(2)}
        await end.socket.send(jcs({**frame, "payload": new_leaf(rig, ca)}).decode())
        assert (await end.command()).payload["ok"] is True
        assert rig.parts.identity.leaf_pem == rig.node.leaf_pem


async def test_after_a_renewal_the_next_session_is_opened_with_the_new_leaf(
    rig: Rig, renewing: Renewing, ca: SimulatedCa
) -> None:
    async with rig.running():
        end = await rig.opened()
        asked = await end.receive("renew")
        answer = new_leaf(rig, ca)
        await end.send_payload("renew_ack", answer, answers=asked.msg_id)
        await asyncio.wait_for(renewing.renewed.wait(), BOUND_S)
        end.drop()
        (await rig.waits.next()).end()
        auth = await (await rig.relay.next()).admit()
    assert auth.payload["certificate"] == answer["certificate"] + rig.node.leaf_pem + ca.root_pem
    kid = kid_of(certificates_in(answer["certificate"])[0])
    verifier = TokenVerifier(SchemaRegistry(), DEVICE_REF)
    keys = {kid: rig.node.public_key}
    verifier.verify(auth.payload["token"], keys.get, audience=rig.relay.url, now_s=NOW_MS // 1000)


# --- the end


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


# --- one-way frames


async def test_one_way_frames_of_the_relay_reach_their_handler_and_bad_ones_are_counted(rig: Rig) -> None:
    received: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()
    events: list[LinkEvent] = []
    frames = rig.parts.frames
    frames.on_frame(FrameType.TELEMETRY_LEASE, received.put_nowait)
    frames.on_link(events.append)
    async with rig.running():
        end = await rig.relay.next()
        await end.admit()
        await end.socket.send(frame_text("telemetry_lease", 900, ttl_ms=-1))
        await end.send("telemetry_lease")
        assert await asyncio.wait_for(received.get(), BOUND_S) == PAYLOADS["telemetry_lease"]
        assert frames.dropped == {DropReason.MALFORMED: 1}
        assert frames.send(FrameType.TELEMETRY, PAYLOADS["telemetry"])
        assert (await end.receive("telemetry")).payload == PAYLOADS["telemetry"]
        end.drop()
        await rig.waits.next()
        assert events == [LinkEvent.CONNECTED, LinkEvent.LOST]
