import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from kubelet.announce.announcer import LONGEST_INTERVAL_S, Announcer, Sender
from kubelet.announce.signer import ManifestSigner, SignedManifest
from schemas.kinds import KindRegistry
from schemas.manifest import MAX_TTL_MS
from schemas.process.logs import make_logger
from schemas.registry import SchemaRegistry
from schemas.trust import Known, Outcome, TrustRules
from tests.fakes.background import in_background
from tests.fakes.chance import FixedChance
from tests.fakes.clock import FakeClock, hurried_ticks
from tests.fakes.lines import LogLines
from tests.fakes.node import signer_of
from tests.fakes.pauses import Pauses
from tests.fakes.signer import DAY_MS, NOW_MS, TTL_MS, SimulatedNode

BOUND_S = 30
INTERVAL_S = 60.0


@dataclass
class ScriptedSender:
    """A sender that hands over to the test what it sends, and takes it or not."""

    takes: bool = True
    sent: asyncio.Queue[SignedManifest] = field(default_factory=asyncio.Queue)

    async def send(self, manifest: SignedManifest) -> bool:
        await self.sent.put(manifest)
        return self.takes

    async def next(self) -> SignedManifest:
        return await asyncio.wait_for(self.sent.get(), BOUND_S)


@dataclass
class Rig:
    announcer: Announcer
    pauses: Pauses
    sender: ScriptedSender

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with in_background(self.announcer.run()):
            yield


def make_signer(
    node: SimulatedNode,
    clock: FakeClock,
    registry: SchemaRegistry,
    log: LogLines,
    ticks: FakeClock | None = None,
) -> ManifestSigner:
    return signer_of(node, clock, registry, make_logger("kubelet", log), ticks_ms=ticks or hurried_ticks())


@pytest.fixture
def signer(node: SimulatedNode, clock: FakeClock, registry: SchemaRegistry, log: LogLines) -> ManifestSigner:
    return make_signer(node, clock, registry, log)


def make_rig(signer: ManifestSigner, log: LogLines, *, share: float = 0.5) -> Rig:
    pauses = Pauses()
    announcer = Announcer(
        signer, INTERVAL_S, FixedChance(share), make_logger("kubelet", log), sleep=pauses.sleep
    )
    sender = ScriptedSender()
    announcer.add_sender(sender.send)
    return Rig(announcer, pauses, sender)


@pytest.fixture
def rig(signer: ManifestSigner, log: LogLines) -> Rig:
    return make_rig(signer, log)


async def test_the_first_manifest_is_announced_at_once_to_every_sender(rig: Rig) -> None:
    other = ScriptedSender()
    rig.announcer.add_sender(other.send)
    assert (rig.announcer.current, rig.announcer.published) == (None, None)
    async with rig.running():
        manifest = await rig.sender.next()
        assert await other.next() == manifest
        await rig.pauses.next()
    assert rig.announcer.current == rig.announcer.published == manifest


@pytest.mark.holds("RFC-0001/2/refreshed-on-heartbeat")
async def test_a_heartbeat_signs_anew_with_a_later_expiry(
    rig: Rig, clock: FakeClock, node: SimulatedNode, registry: SchemaRegistry, kinds: KindRegistry
) -> None:
    async with rig.running():
        first = await rig.sender.next()
        clock.advance(60_000)
        (await rig.pauses.next()).end()
        second = await rig.sender.next()
    assert (first.expires_at_ms, second.expires_at_ms) == (NOW_MS + TTL_MS, NOW_MS + 60_000 + TTL_MS)
    known = Known({node.kid: node.identity()})
    verdict = TrustRules(registry, kinds).accept(second.wire, node.node_id, clock(), known)
    assert verdict.outcome is Outcome.ACCEPTED


@pytest.mark.parametrize(
    ("share", "seconds"),
    [
        pytest.param(0.0, 54.0, id="a tenth less at least"),
        pytest.param(0.5, 60.0, id="the interval on average"),
        pytest.param(1.0, 66.0, id="a tenth more at most"),
    ],
)
async def test_heartbeats_are_spread_by_a_tenth(
    signer: ManifestSigner, log: LogLines, share: float, seconds: float
) -> None:
    rig = make_rig(signer, log, share=share)
    async with rig.running():
        for _ in range(2):
            pause = await rig.pauses.next()
            assert pause.seconds == pytest.approx(seconds)
            pause.end()


async def test_another_interval_and_lifetime_apply_at_once(rig: Rig) -> None:
    async with rig.running():
        await rig.sender.next()
        await rig.pauses.next()
        rig.announcer.change(30.0, 2 * TTL_MS)
        manifest = await rig.sender.next()
        pause = await rig.pauses.next()
    assert manifest.expires_at_ms - manifest.issued_at_ms == 2 * TTL_MS
    assert pause.seconds == pytest.approx(30)


@pytest.mark.parametrize(
    ("own_s", "asked_s", "interval_s"),
    [
        pytest.param(30.0, 10.0, 10.0, id="the relay's shorter one outlasts a change"),
        pytest.param(5.0, 10.0, 5.0, id="the operator's shorter one"),
        pytest.param(30.0, 150.0, 30.0, id="what the operator names is not made longer"),
        pytest.param(INTERVAL_S, 3600.0, LONGEST_INTERVAL_S, id="no less often than in five minutes"),
    ],
)
async def test_the_interval_is_what_relay_and_operator_ask_for(
    rig: Rig, own_s: float, asked_s: float, interval_s: float
) -> None:
    rig.announcer.follow_interval(asked_s)
    rig.announcer.change(own_s, TTL_MS)
    assert rig.announcer.interval_s == interval_s


async def test_overtaking_announces_at_once_and_newer_and_the_heart_beats_on(rig: Rig) -> None:
    async with rig.running():
        await rig.sender.next()
        await rig.pauses.next()
        rig.announcer.advance_past(NOW_MS + 5_000)
        assert (await rig.sender.next()).issued_at_ms == NOW_MS + 5_001
        assert (await rig.pauses.next()).seconds == INTERVAL_S


async def test_a_relay_that_always_asks_for_a_newer_one_gets_one_a_second(
    node: SimulatedNode, clock: FakeClock, registry: SchemaRegistry, log: LogLines
) -> None:
    ticks = FakeClock(0)
    rig = make_rig(make_signer(node, clock, registry, log, ticks), log)

    async def rejecting(manifest: SignedManifest) -> bool:
        rig.announcer.advance_past(manifest.issued_at_ms)
        return True

    rig.announcer.add_sender(rejecting)
    async with rig.running():
        for count in range(1, 4):
            await rig.sender.next()
            heartbeat, turn = await rig.pauses.next(), await rig.pauses.next()
            assert (heartbeat.seconds, turn.seconds) == (INTERVAL_S, 1.0)
            assert rig.sender.sent.empty()
            ticks.advance(1_000)
            turn.end()
            assert ticks() == 1_000 * count


async def test_a_mark_that_is_too_far_ahead_announces_nothing(rig: Rig) -> None:
    async with rig.running():
        await rig.sender.next()
        pause = await rig.pauses.next()
        rig.announcer.advance_past(NOW_MS + 30 * DAY_MS)
        for _ in range(10):  # more turns of the loop than announcing at once would take
            await asyncio.sleep(0)
        assert rig.sender.sent.empty()
        pause.end()
        assert (await rig.sender.next()).issued_at_ms == NOW_MS + 1
        await rig.pauses.next()
        assert rig.sender.sent.empty()


async def test_after_a_clock_that_was_ahead_the_next_is_of_now_and_at_once(
    rig: Rig, clock: FakeClock
) -> None:
    """The relay has no mark that counts, or an earlier one."""
    clock.advance(30 * DAY_MS)
    async with rig.running():
        await rig.sender.next()
        await rig.pauses.next()
        clock.advance(-30 * DAY_MS)
        rig.announcer.advance_past(0)
        assert (await rig.sender.next()).issued_at_ms == NOW_MS


async def test_a_mark_that_comes_while_a_manifest_is_sent_is_not_lost(rig: Rig) -> None:
    seen: list[int] = []

    async def rejected_once(manifest: SignedManifest) -> bool:
        seen.append(manifest.issued_at_ms)
        if len(seen) == 1:
            rig.announcer.advance_past(NOW_MS + 5_000)
        return True

    rig.announcer.add_sender(rejected_once)
    async with rig.running():
        await rig.sender.next()
        assert (await rig.sender.next()).issued_at_ms == NOW_MS + 5_001
    assert seen[0] == NOW_MS


async def test_a_shorter_interval_holds_from_now_on(rig: Rig) -> None:
    async with rig.running():
        await rig.pauses.next()
        rig.announcer.follow_interval(10)
        assert (await rig.pauses.next()).seconds == 10


async def test_a_longer_interval_holds_after_the_next_heartbeat_and_lifetimes_with_it(rig: Rig) -> None:
    async with rig.running():
        pause = await rig.pauses.next()
        await rig.sender.next()
        rig.announcer.follow_interval(150)
        pause.end()
        assert (await rig.pauses.next()).seconds == pytest.approx(150)
        manifest = await rig.sender.next()
    assert manifest.expires_at_ms - manifest.issued_at_ms == TTL_MS * 150 / INTERVAL_S


async def test_once_the_fleet_is_smaller_the_interval_is_shorter_again(rig: Rig) -> None:
    rig.announcer.follow_interval(300)
    async with rig.running():
        await rig.sender.next()
        await rig.pauses.next()
        rig.announcer.follow_interval(60)
        manifest = await rig.sender.next()
    assert manifest.expires_at_ms - manifest.issued_at_ms == TTL_MS


async def test_no_manifest_is_valid_for_more_than_a_day(rig: Rig) -> None:
    rig.announcer.change(INTERVAL_S, MAX_TTL_MS // 2)
    rig.announcer.follow_interval(300)
    async with rig.running():
        manifest = await rig.sender.next()
    assert manifest.expires_at_ms - manifest.issued_at_ms == MAX_TTL_MS


async def refuses(_manifest: SignedManifest) -> bool:
    return False


async def breaks(_manifest: SignedManifest) -> bool:
    raise RuntimeError("a bug\n\x1b[31mof \u00f6urs")


@pytest.mark.parametrize("broken", [refuses, breaks])
async def test_a_road_that_is_closed_or_broken_does_not_close_the_others(
    signer: ManifestSigner, log: LogLines, broken: Sender
) -> None:
    pauses, sender = Pauses(), ScriptedSender()
    announcer = Announcer(
        signer, INTERVAL_S, FixedChance(0.5), make_logger("kubelet", log), sleep=pauses.sleep
    )
    announcer.add_sender(broken)
    announcer.add_sender(sender.send)
    async with Rig(announcer, pauses, sender).running():
        first = await sender.next()
        (await pauses.next()).end()
        assert (await sender.next()).issued_at_ms > first.issued_at_ms
        await pauses.next()
        assert announcer.published == announcer.current


async def test_a_broken_road_is_logged_without_raw_text(rig: Rig, log: LogLines) -> None:
    rig.announcer.add_sender(breaks)
    async with rig.running():
        line = await log.until("manifest not sent")
    assert line["error"] == r"RuntimeError: a bug\n\x1b[31mof \xf6urs"


async def test_a_manifest_that_no_transport_takes_is_current_but_not_published(rig: Rig) -> None:
    rig.sender.takes = False
    async with rig.running():
        manifest = await rig.sender.next()
        await rig.pauses.next()
    assert (rig.announcer.current, rig.announcer.published) == (manifest, None)


async def test_a_new_connection_is_sent_what_is_current(rig: Rig) -> None:
    late = ScriptedSender()
    await rig.announcer.send_current(late.send)
    assert late.sent.empty()
    async with rig.running():
        manifest = await rig.sender.next()
        await rig.announcer.send_current(late.send)
        assert await late.next() == manifest


async def test_nothing_is_announced_until_the_clock_is_set(rig: Rig, clock: FakeClock, log: LogLines) -> None:
    clock.now_ms = 0
    async with rig.running():
        pause = await rig.pauses.next()
        assert (rig.sender.sent.empty(), rig.announcer.current) == (True, None)
        assert pause.seconds < INTERVAL_S
        assert log.entries("nothing announced")[0]["level"] == "warning"
        assert rig.announcer.blocked_reason.startswith("the clock is not set")
        clock.now_ms = NOW_MS
        pause.end()
        assert (await rig.sender.next()).issued_at_ms == NOW_MS
        assert rig.announcer.blocked_reason == ""
