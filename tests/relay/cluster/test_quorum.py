"""When a relay looks for another server, on a clock that the test moves."""

import asyncio
from collections.abc import Callable

from nats.aio.client import Client

from relay.cluster.connection import Work
from relay.cluster.presence import Presence
from relay.cluster.presence_effects import Effects
from relay.cluster.quorum import CHECK_INTERVAL_S, FIRST_PATIENCE_S, LONGEST_PATIENCE_S, Quorum
from relay.cluster.relay_leases import LEASE_S
from tests.fakes.seconds import Seconds


class Stage:
    """A relay at a server, which it leaves with the given try. ``is_read`` tells when presence is read."""

    def __init__(self, leaves_at: int, is_read: Callable[[float], bool] = lambda _: False) -> None:
        self.seconds = Seconds()
        self.began_s = self.seconds.now
        self.tried_s: list[float] = []
        self._leaves_at = leaves_at
        self._is_read = is_read
        effects = Effects(lambda *_: None, lambda *_: True, lambda _: None, lambda *_: None)
        self.presence = Presence("OWN", effects, self.seconds)
        self.quorum = Quorum(self.presence, self._move, stream="a stream", sleep=self._sleep)

    async def run(self) -> None:
        async with asyncio.timeout(10):
            await self.quorum.serve(Client())

    async def _sleep(self, seconds: float) -> None:
        self.seconds.now += seconds
        if self._is_read(self.seconds.now - self.began_s):
            self.presence.relay_seen("OWN")

    async def _move(self, _check: Work, _reason: str) -> bool:
        self.tried_s.append(self.seconds.now - self.began_s)
        return len(self.tried_s) == self._leaves_at


async def test_others_are_tried_less_and_less_often_until_one_is_better() -> None:
    stage = Stage(leaves_at=6)
    await stage.run()
    steps = [later - before for before, later in zip([0.0, *stage.tried_s], stage.tried_s, strict=False)]
    assert steps == [5, 10, 20, 40, 60, 60]
    assert (steps[0], steps[-1]) == (FIRST_PATIENCE_S, LONGEST_PATIENCE_S)


async def test_a_server_at_which_presence_is_read_is_not_left() -> None:
    stage = Stage(leaves_at=1, is_read=lambda now_s: now_s <= 1000)
    await stage.run()
    assert stage.tried_s == [1000 + LEASE_S - CHECK_INTERVAL_S + FIRST_PATIENCE_S]


async def test_a_server_that_is_of_use_again_has_the_first_patience_again() -> None:
    stage = Stage(leaves_at=3, is_read=lambda now_s: now_s == 20)
    await stage.run()
    assert stage.tried_s == [5, 15, 20 + LEASE_S - CHECK_INTERVAL_S + FIRST_PATIENCE_S]
