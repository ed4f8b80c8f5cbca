"""The tests count turns of the event loop: a task that sleeps for 0 s takes one of each."""

import asyncio

import pytest

from relay.sessions.connect_limiter import ConnectLimiter
from relay.sessions.connect_queue import ConnectQueue

NOW = 5000.0
PROXY = "127.0.0.1"
UNLIMITED = 1e9


class Connects:
    """Connects and handshakes that wait in one queue.

    Attributes:
        queue: the queue, with ``steps_per_turn``.
        done: those that had their turn, by the names that the test gave them.
    """

    def __init__(self, steps_per_turn: int = 2) -> None:
        self.queue = ConnectQueue(ConnectLimiter(UNLIMITED, UNLIMITED), lambda: NOW, steps_per_turn)
        self.done: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []

    def come(self, *names: str) -> None:
        """Let nodes connect, in this order."""
        self.tasks += [asyncio.create_task(self._come(name)) for name in names]

    def go_on(self, *names: str) -> None:
        """Let handshakes go on, in this order."""
        self.tasks += [asyncio.create_task(self._go_on(name)) for name in names]

    async def _come(self, name: str) -> None:
        assert await self.queue.enter(PROXY) == 0
        self.done.append(name)

    async def _go_on(self, name: str) -> None:
        await self.queue.go_on()
        self.done.append(name)

    async def steps_by_turn(self) -> list[int]:
        """Return how many had their turn in each turn of the event loop, until all had."""
        steps = []
        while any(not task.done() for task in self.tasks):
            before = len(self.done)
            await asyncio.sleep(0)
            steps.append(len(self.done) - before)
        return steps


async def test_a_few_steps_run_in_each_turn_in_the_order_of_the_connects() -> None:
    connects = Connects(steps_per_turn=2)
    connects.come(*"abcdefg")
    assert max(await connects.steps_by_turn()) == 2
    assert connects.done == list("abcdefg")


async def test_handshakes_that_have_begun_go_on_before_new_ones_begin() -> None:
    connects = Connects(steps_per_turn=2)
    connects.come(*"abcd")
    connects.go_on(*"xyz")
    assert max(await connects.steps_by_turn()) == 2
    assert connects.done == list("xyzabcd")


async def test_the_queue_goes_on_after_it_was_empty() -> None:
    connects = Connects()
    for name in "ab":
        connects.come(name)
        await asyncio.wait_for(asyncio.gather(*connects.tasks), 5)
    assert connects.done == list("ab")


async def test_a_connection_that_ended_while_it_waited_uses_no_turn_of_the_others() -> None:
    connects = Connects(steps_per_turn=2)
    connects.come(*"abcdef")
    await asyncio.sleep(0)
    assert not connects.done
    for task in connects.tasks[:4]:
        task.cancel()
    assert [count for count in await connects.steps_by_turn() if count] == [2]
    assert connects.done == list("ef")


async def test_a_connect_over_the_rate_is_told_so_without_waiting() -> None:
    queue = ConnectQueue(ConnectLimiter(rate=10, burst=1), lambda: NOW)
    assert await queue.enter(PROXY) == 0
    with pytest.raises(StopIteration) as returned:
        queue.enter(PROXY).send(None)
    assert returned.value.value == pytest.approx(0.1)


async def test_a_relay_that_is_slower_than_the_rate_sends_away_and_goes_on() -> None:
    queue = ConnectQueue(ConnectLimiter(rate=10, burst=10), lambda: NOW, steps_per_turn=1, most_waiting=3)
    waits = await asyncio.gather(*(queue.enter(PROXY) for _ in range(5)))
    assert waits == pytest.approx([0, 0, 0, 0.1, 0.2])
    assert await queue.enter(PROXY) == 0
