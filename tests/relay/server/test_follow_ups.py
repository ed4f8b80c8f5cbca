import asyncio
from contextlib import suppress

import pytest

from relay.server.decisions import FollowUps

BOUND_S = 10


class Part:
    """Something that follows; as often as ``fails`` says it cannot."""

    def __init__(self, fails: int = 0) -> None:
        self.fails = fails
        self.asked = 0
        self._followed: asyncio.Queue[None] = asyncio.Queue()

    async def __call__(self) -> bool:
        self.asked += 1
        done = self.asked > self.fails
        if done:
            self._followed.put_nowait(None)
        return done

    async def has_followed(self) -> None:
        await asyncio.wait_for(self._followed.get(), BOUND_S)


async def test_all_are_behind_until_they_have_followed_once() -> None:
    parts = [Part(), Part()]
    follow_ups = FollowUps(parts)
    assert await follow_ups.follow()
    assert await follow_ups.follow()
    assert [part.asked for part in parts] == [1, 1]


async def test_after_a_change_all_follow_again() -> None:
    parts = [Part(), Part()]
    follow_ups = FollowUps(parts)
    assert await follow_ups.follow()
    follow_ups.due()
    follow_ups.due()
    assert await follow_ups.follow()
    assert [part.asked for part in parts] == [2, 2]


async def test_only_who_could_not_follow_is_asked_again() -> None:
    broken, sound = Part(fails=2), Part()
    follow_ups = FollowUps([broken, sound])
    assert [await follow_ups.follow() for _ in range(4)] == [False, False, True, True]
    assert (broken.asked, sound.asked) == (3, 1)


@pytest.mark.parametrize("done", [True, False])
async def test_a_change_while_they_follow_makes_all_of_them_follow_again(*, done: bool) -> None:
    asked: list[str] = []

    async def changes() -> bool:
        asked.append("changes")
        if len(asked) == 2:
            follow_ups.due()
        return done or len(asked) > 2

    async def first() -> bool:
        asked.append("first")
        return True

    follow_ups = FollowUps([first, changes])
    assert not await follow_ups.follow()
    assert await follow_ups.follow()
    assert asked == ["first", "changes"] * 2


async def test_while_it_runs_they_follow_at_once_and_after_each_change() -> None:
    part = Part()
    follow_ups = FollowUps([part], retry_s=1000)
    task = asyncio.create_task(follow_ups.run())
    for _ in range(3):
        await part.has_followed()
        follow_ups.due()
    await part.has_followed()
    assert part.asked == 4
    await ended(task)


async def test_what_has_failed_is_tried_again_without_another_change() -> None:
    broken, sound = Part(fails=3), Part()
    task = asyncio.create_task(FollowUps([broken, sound], retry_s=0.001).run())
    await broken.has_followed()
    assert (broken.asked, sound.asked) == (4, 1)
    await ended(task)


async def test_after_a_change_what_has_failed_is_tried_at_once() -> None:
    part = Part(fails=1)
    follow_ups = FollowUps([part], retry_s=1000)
    task = asyncio.create_task(follow_ups.run())
    async with asyncio.timeout(BOUND_S):
        while not part.asked:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0)
    follow_ups.due()
    await part.has_followed()
    await ended(task)


async def ended(task: asyncio.Task[None]) -> None:
    assert not task.done()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
