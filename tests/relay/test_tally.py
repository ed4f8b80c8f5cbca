"""Refusals and drops in the audit: one counted line for each source, reason and second."""

import asyncio
from contextlib import suppress

from relay.tally import Tally
from tests.fakes.disk import full_disk
from tests.fakes.hub import Hub
from tests.fakes.signer import NOW_MS


def test_what_happens_often_is_one_line_with_a_count(hub: Hub) -> None:
    for _ in range(3):
        hub.tally.count("token_refused", "192.0.2.1", "expired")
    hub.tally.count("token_refused", "192.0.2.1", "signature", times=2)
    hub.tally.write()
    assert hub.audited() == [
        {
            "ts_ms": NOW_MS,
            "event": "token_refused",
            "source": "192.0.2.1",
            "reason": reason,
            "count": count,
        }
        for reason, count in (("expired", 3), ("signature", 2))
    ]


def test_what_was_written_is_not_written_again(hub: Hub) -> None:
    hub.tally.count("node_refused", "192.0.2.1", "chain")
    hub.tally.write()
    hub.tally.write()
    assert len(hub.audited()) == 1


def test_a_thousand_sources_are_told_apart_and_the_rest_are_others(hub: Hub) -> None:
    for number in range(1500):
        hub.tally.count("token_refused", f"source {number}", "expired")
    hub.tally.write()
    lines = hub.audited()
    assert len(lines) == 1001
    assert (lines[-1]["source"], lines[-1]["count"]) == ("others", 500)


def test_what_cannot_be_written_is_kept_and_counted_on(hub: Hub) -> None:
    hub.tally.count("node_refused", "192.0.2.1", "chain")
    with full_disk():
        hub.tally.write()
    hub.tally.count("node_refused", "192.0.2.1", "chain")
    hub.tally.write()
    [line] = hub.audited()
    assert line["count"] == 2


async def test_counts_are_written_once_an_interval_and_when_it_ends(hub: Hub) -> None:
    tally = Tally(hub.audit, hub.log, interval_s=0.001)
    running = asyncio.create_task(tally.run())
    tally.count("node_refused", "192.0.2.1", "chain")
    async with asyncio.timeout(10):
        while not await asyncio.to_thread(hub.audited):
            continue
    tally.count("node_refused", "192.0.2.1", "late")
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    assert [line["reason"] for line in hub.audited()] == ["chain", "late"]
