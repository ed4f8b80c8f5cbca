import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from kubelet.handlers.base import Handler, ToolFault
from kubelet.telemetry import TelemetrySampler
from schemas.errors import Failure, ToolError
from schemas.kinds import KindRegistry
from schemas.payloads import TelemetryLease
from schemas.process.logs import make_logger
from schemas.registry import SchemaRegistry
from tests.fakes.lines import LogLines
from tests.fakes.pauses import Pauses
from tests.fakes.seconds import Seconds
from tests.fakes.shipped_kinds import echo_handler
from tests.fakes.signer import METRICS, NODE_ID, NOW_MS


class Meter(Handler):
    """Counts its samples; fails with what the test sets."""

    def __init__(self) -> None:
        self.asked: list[Mapping[str, Any]] = []
        self.error: Exception | None = None

    @property
    def capability(self) -> Mapping[str, Any]:
        return {**METRICS, "verbs": ["snapshot", "subscribe"]}

    async def invoke(self, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        assert verb == "subscribe"
        self.asked.append(arguments)
        if self.error is not None:
            raise self.error
        return {"number": len(self.asked)}


class Stage:
    """A node's leases on a clock and with pauses that the test moves."""

    def __init__(self, registry: SchemaRegistry) -> None:
        self.meter = Meter()
        self.lines = LogLines()
        self.clock = Seconds()
        self.pauses = Pauses()
        self.taken: list[tuple[str, Mapping[str, Any]]] = []
        self.telemetry = TelemetrySampler(
            [echo_handler(NODE_ID, lambda: NOW_MS), self.meter],
            KindRegistry(),
            registry,
            lambda cap_id, sample: self.taken.append((cap_id, sample)),
            make_logger("kubelet", self.lines),
            monotonic=self.clock,
            sleep=self.pauses.sleep,
        )

    def lease(self, interval_ms: int = 1000, ttl_ms: int = 30_000, **members: Any) -> None:
        lease: Any = {"cap_id": "sysmetrics", "interval_ms": interval_ms, "ttl_ms": ttl_ms, **members}
        payload: TelemetryLease = lease
        self.telemetry.lease(payload)

    async def pass_pause(self) -> float:
        """Let the pause that the loop is in pass, and return its length."""
        pause = await self.pauses.next()
        self.clock.now += pause.seconds
        pause.end()
        return pause.seconds


@pytest.fixture
async def stage(registry: SchemaRegistry) -> AsyncIterator[Stage]:
    stage = Stage(registry)
    yield stage
    await stage.telemetry.close()


def is_sampling() -> bool:
    """Return whether there is a task besides that of the test."""
    return asyncio.all_tasks() != {asyncio.current_task()}


async def ended() -> None:
    """Let the loop end: it needs a few turns of the event loop, and no time."""
    for _ in range(5):
        await asyncio.sleep(0)
    assert not is_sampling()


async def test_samples_are_taken_at_once_and_then_at_the_interval(stage: Stage) -> None:
    stage.lease(2000, include=["cpu"])
    assert [await stage.pass_pause() for _ in range(3)] == [2, 2, 2]
    await stage.pauses.next()
    assert stage.taken == [("sysmetrics", {"number": number}) for number in (1, 2, 3, 4)]
    assert stage.meter.asked[0] == {"interval_ms": 2000, "include": ["cpu"]}


async def test_what_a_sample_takes_does_not_lengthen_the_interval(stage: Stage) -> None:
    stage.lease()
    pause = await stage.pauses.next()
    stage.clock.now += 1.25  # woken late
    pause.end()
    assert await stage.pass_pause() == 0.75


async def test_a_lease_that_is_not_renewed_ends_within_an_interval(stage: Stage) -> None:
    stage.lease(10_000, ttl_ms=30_000)
    for _ in range(3):
        await stage.pass_pause()
    await ended()
    assert len(stage.taken) == 3


async def test_a_lease_that_is_renewed_goes_on_without_another_sample(stage: Stage) -> None:
    stage.lease(10_000, ttl_ms=10_000)
    pause = await stage.pauses.next()
    stage.lease(10_000, ttl_ms=30_000)
    stage.clock.now += pause.seconds
    pause.end()
    await stage.pauses.next()
    assert len(stage.taken) == 2


async def test_a_time_of_zero_ends_the_lease_at_once(stage: Stage) -> None:
    stage.lease()
    await stage.pauses.next()
    stage.lease(ttl_ms=0)
    await ended()
    assert len(stage.taken) == 1


async def test_a_shorter_interval_applies_at_once_and_a_longer_one_after_the_next_sample(
    stage: Stage,
) -> None:
    stage.lease(60_000, ttl_ms=180_000)
    await stage.pauses.next()
    stage.lease(1000)
    assert await stage.pass_pause() == 1
    stage.lease(5000)
    assert (await stage.pauses.next()).seconds == 5
    assert len(stage.taken) == 3


@pytest.mark.holds("RFC-0001/5.3/interval-required")
@pytest.mark.parametrize(
    "members",
    [
        pytest.param({"cap_id": "echo"}, id="a capability that streams nothing"),
        pytest.param({"cap_id": "other"}, id="no capability of this node"),
        pytest.param({"interval_ms": 60_001}, id="an interval that its verb does not take"),
        pytest.param({"include": ["gpu"]}, id="a part that its verb does not take"),
    ],
)
async def test_a_lease_that_does_not_fit_what_the_node_offers_is_refused(
    stage: Stage, members: dict[str, Any]
) -> None:
    stage.lease(**members)
    assert not is_sampling()
    assert stage.lines.entries("a lease that does not fit what this node offers")


@pytest.mark.parametrize(
    "error",
    [ToolError(Failure.RATE_LIMITED), TimeoutError(), ToolFault("no_answer", "hangs"), ZeroDivisionError()],
)
async def test_a_sample_that_fails_does_not_end_the_lease(stage: Stage, error: Exception) -> None:
    stage.meter.error = error
    stage.lease()
    await stage.pass_pause()
    stage.meter.error = None
    await stage.pauses.next()
    assert stage.taken == [("sysmetrics", {"number": 2})]
    faults = stage.lines.entries("sample failed")
    assert bool(faults) == isinstance(error, ZeroDivisionError)


async def test_closing_ends_all_leases(stage: Stage) -> None:
    stage.lease()
    await stage.pauses.next()
    assert is_sampling()
    await stage.telemetry.close()
    assert not is_sampling()
