"""Threads, the audit and parts that are slow do not delay a revocation."""

import asyncio
from threading import Event

import pytest

from relay.state.certificates import CaRecords
from relay.state.kinds import CERTIFICATES
from schemas.errors import Failure
from tests.fakes.disk import full_disk
from tests.fakes.signer import NODE_ID, OTHER_NODE_ID
from tests.fakes.watched_relay import BOUND_S, Stage, failure

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

THIRD_NODE_ID = NODE_ID[:-1] + "1"


async def test_ledgers_are_looked_at_while_the_event_loop_is_held_up(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = stage.watching(look_s=0.001)
    watch.begin()
    task = asyncio.create_task(watch.run())
    await asyncio.sleep(0)
    counted = Event()

    def read(name: str) -> None:
        if name == CERTIFICATES.name:
            counted.set()

    monkeypatch.setattr(stage.hub.freshness, "read", read)
    assert counted.wait(BOUND_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_part_that_does_not_follow_yet_holds_up_no_revocation(stage: Stage) -> None:
    began = asyncio.Queue[None]()

    async def never_done() -> bool:
        began.put_nowait(None)
        await asyncio.Event().wait()
        return True

    watch = stage.watching(never_done, look_s=0)
    watch.begin()
    following, task = asyncio.create_task(stage.follow_ups.run()), asyncio.create_task(watch.run())
    await asyncio.wait_for(began.get(), BOUND_S)
    node = stage.real.node()
    stage.hub.announce(node)
    stage.real.as_operator().revoke(NODE_ID)
    async with asyncio.timeout(BOUND_S):
        while failure(stage.hub, node) is not Failure.ATTESTATION_FAILED:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0)
    for ended in (task, following):
        ended.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ended


async def test_the_event_loop_goes_on_while_the_ledgers_are_read(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = stage.real.node()
    stage.hub.announce(node)
    stage.real.as_operator().revoke(NODE_ID)
    stage.revoke_token("jti-1")
    read_on = Event()
    records = stage.real.ca.records

    def slow() -> CaRecords:
        assert read_on.wait(BOUND_S)
        return records()

    monkeypatch.setattr(stage.real.ca, "records", slow)
    looking = asyncio.create_task(stage.watch.poll())
    async with asyncio.timeout(BOUND_S):  # a token does not wait for the leaves
        while not stage.hub.lines.entries("token_revoked"):  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0)
    assert not looking.done()
    assert failure(stage.hub, node) is None
    read_on.set()
    await asyncio.wait_for(looking, BOUND_S)
    assert failure(stage.hub, node) is Failure.ATTESTATION_FAILED


async def test_those_who_wait_for_the_ca_on_threads_hold_up_no_revocation(stage: Stage) -> None:
    node = stage.real.node()
    stage.hub.announce(node)
    stage.real.as_operator().revoke(NODE_ID)
    free = Event()
    waiting = [asyncio.create_task(asyncio.to_thread(free.wait, BOUND_S)) for _ in range(40)]
    await asyncio.sleep(0)
    await asyncio.wait_for(stage.watch.poll(), BOUND_S)
    assert failure(stage.hub, node) is Failure.ATTESTATION_FAILED
    assert not any(task.done() for task in waiting)
    free.set()
    await asyncio.gather(*waiting)


async def test_a_revocation_takes_effect_though_the_audit_cannot_be_written_and_is_recorded_when_it_can(
    stage: Stage,
) -> None:
    first, second, last = stage.real.node(), stage.real.node(OTHER_NODE_ID), stage.real.node(THIRD_NODE_ID)
    stage.hub.announce(first)
    for node in (first, second):
        stage.real.as_operator().revoke(node.node_id)
        with full_disk(0):
            await stage.watch.poll()
            await stage.watch.poll()
        assert failure(stage.hub, first) is Failure.ATTESTATION_FAILED
    assert stage.events() == []
    stage.real.as_operator().revoke(THIRD_NODE_ID)
    await stage.watch.poll()
    kids = [node.kid for node in (first, second, last)]
    assert stage.events() == [{"event": "leaf_revoked", "kid": kid} for kid in kids]
    (line,) = stage.hub.lines.entries("not recorded")
    assert (line["level"], line["what"]) == ("error", {"event": "leaf_revoked", "kid": first.kid})
    await stage.watch.poll()
    assert len(stage.events()) == 3


async def test_not_more_than_so_much_waits_to_be_recorded_and_what_is_left_out_is_in_the_log(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.server.decisions.MAX_UNRECORDED", 1)
    for jti in ("jti-1", "jti-2"):
        stage.revoke_token(jti)
    with full_disk(0):
        await stage.watch.poll()
    assert [line["what"]["jti"] for line in stage.hub.lines.entries("not recorded")] == ["jti-2", "jti-1"]
    await stage.watch.poll()
    assert stage.events() == [{"event": "token_revoked", "jti": "jti-1"}]
