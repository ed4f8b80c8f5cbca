"""Decisions in the audit: each once, in their order, also when the disk takes them late."""

import asyncio
from contextlib import suppress

import pytest

from relay.audit.log import AuditUnavailableError
from relay.server import decisions
from relay.server.decisions import DecisionRecords, FollowUps
from tests.fakes.disk import full_disk
from tests.fakes.hub import Hub


@pytest.fixture
def records(hub: Hub) -> DecisionRecords:
    return DecisionRecords(hub.audit, hub.log)


def audited(hub: Hub) -> list[tuple[str, str]]:
    return [(line["event"], line["kid"]) for line in hub.audited()]


def unrecorded(hub: Hub) -> list[tuple[str, str]]:
    """Return the reason and the kid of each decision that the log has as not recorded."""
    return [(line["reason"], line["what"]["kid"]) for line in hub.lines.entries("not recorded")]


def test_decisions_are_in_the_audit_in_their_order_and_once(hub: Hub, records: DecisionRecords) -> None:
    for kid in ("a", "b", "c"):
        records.add("leaf_revoked", kid=kid)
    records.write()
    records.write()
    assert audited(hub) == [("leaf_revoked", kid) for kid in ("a", "b", "c")]


def test_a_decision_is_in_the_log_before_it_is_in_the_audit(hub: Hub, records: DecisionRecords) -> None:
    records.add("leaf_revoked", kid="a")
    [line] = hub.lines.entries("leaf_revoked")
    assert (line["level"], line["kid"]) == ("warning", "a")
    assert hub.audit_file.read_bytes() == b""


def test_what_the_audit_does_not_take_is_written_once_it_does(hub: Hub, records: DecisionRecords) -> None:
    records.add("leaf_revoked", kid="a")
    records.add("leaf_revoked", kid="b")
    with full_disk():
        records.write()
        records.add("leaf_revoked", kid="c")
        records.write()
    records.write()
    assert audited(hub) == [("leaf_revoked", kid) for kid in ("a", "b", "c")]


def test_each_decision_that_is_not_recorded_is_logged_once(
    hub: Hub, records: DecisionRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []

    def fails_after_one(*, kid: str, **_facts: str) -> None:
        if written:
            raise AuditUnavailableError("the disk is full")
        written.append(kid)

    monkeypatch.setattr(hub.audit, "write", fails_after_one)
    # Two that are alike are two decisions.
    for kid in ("a", "b", "b"):
        records.add("leaf_revoked", kid=kid)
    for _ in range(3):
        records.write()
    assert unrecorded(hub) == [("the disk is full", "b")]
    written.clear()
    for _ in range(3):
        records.write()
    assert unrecorded(hub) == [("the disk is full", "b")] * 2


def test_beyond_the_bound_a_decision_is_logged_and_those_before_it_stay(
    hub: Hub, records: DecisionRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decisions, "MAX_UNRECORDED", 2)
    for kid in ("a", "b", "c"):
        records.add("leaf_revoked", kid=kid)
    assert unrecorded(hub) == [("too many are pending", "c")]
    assert len(hub.lines.entries("leaf_revoked")) == 3
    records.write()
    records.add("leaf_revoked", kid="d")
    records.write()
    assert [kid for _, kid in audited(hub)] == ["a", "b", "d"]


BOUND_S = 30


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
