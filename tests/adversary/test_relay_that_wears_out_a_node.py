"""Attacker: the relay itself, which a node was enrolled with and which is not honest any more. Tried: it
rejects every manifest at once, and names a mark that the next one must pass: just this one's, one as far
ahead as may be, one a month ahead.

What must happen: the node signs once a second at most, writes its state once in ten seconds at most, and
dates no manifest more than five minutes ahead; what its file holds is never behind what it published.
"""

import asyncio
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from kubelet.announce.announcer import Announcer
from kubelet.announce.signer import SignedManifest
from schemas.manifest import MAX_FUTURE_MS
from schemas.process.logs import make_logger
from schemas.registry import SchemaRegistry
from tests.fakes.chance import FixedChance
from tests.fakes.clock import FakeClock
from tests.fakes.lines import LogLines
from tests.fakes.node import signer_of
from tests.fakes.signer import DAY_MS, NOW_MS, SimulatedNode

BOUND_S = 30
HEARTBEAT_S = 60.0
MANIFESTS = 40

HighWaterMark = Callable[[int, int], int]
"""The mark that the relay names, by the node's clock and the time of the manifest that it rejects."""


class Victim:
    """A node's announcer on a clock that moves only while the node waits for its turn."""

    def __init__(
        self, node: SimulatedNode, registry: SchemaRegistry, file: Path, mark: HighWaterMark
    ) -> None:
        self.clock = FakeClock(NOW_MS)
        self.file = file
        self.signed_at: list[int] = []
        self.written: set[int] = set()
        self.done = asyncio.Event()
        self._mark = mark
        log = make_logger("kubelet", LogLines())
        signer = signer_of(node, self.clock, registry, log, last_issued=file, ticks_ms=self.clock)
        self.announcer = Announcer(signer, HEARTBEAT_S, FixedChance(0.5), log, sleep=self._sleep)
        self.announcer.add_sender(self._reject)

    async def _sleep(self, seconds: float) -> None:
        if seconds >= HEARTBEAT_S:
            # Until something is to be announced at once; if there is nothing, until the heartbeat.
            for _ in range(10):
                await asyncio.sleep(0)
        self.clock.advance(round(seconds * 1000))

    async def _reject(self, manifest: SignedManifest) -> bool:
        self.signed_at.append(self.clock())
        kept = int(self.file.read_text())
        self.written.add(kept)
        assert kept >= manifest.issued_at_ms
        assert manifest.issued_at_ms <= self.clock() + MAX_FUTURE_MS + 1
        self.announcer.advance_past(self._mark(self.clock(), manifest.issued_at_ms))
        if len(self.signed_at) == MANIFESTS:
            self.done.set()
        return True


@pytest.mark.parametrize(
    ("mark", "apart_ms"),
    [
        pytest.param(lambda _now, issued: issued, 1_000, id="just this one"),
        pytest.param(lambda now, _issued: now + MAX_FUTURE_MS, 10_000, id="as far ahead as may be"),
        pytest.param(lambda now, _issued: now + 30 * DAY_MS, 60_000, id="a month ahead"),
    ],
)
async def test_a_relay_that_rejects_everything_costs_a_node_little(
    node: SimulatedNode, registry: SchemaRegistry, tmp_path: Path, mark: HighWaterMark, apart_ms: int
) -> None:
    victim = Victim(node, registry, tmp_path / "last_issued_ms", mark)
    task = asyncio.create_task(victim.announcer.run())
    await asyncio.wait_for(victim.done.wait(), BOUND_S)
    task.cancel()
    await asyncio.wait([task])
    times = victim.signed_at
    assert min(after - before for before, after in pairwise(times)) >= apart_ms
    assert len(victim.written) <= (times[-1] - times[0]) // 10_000 + 1
