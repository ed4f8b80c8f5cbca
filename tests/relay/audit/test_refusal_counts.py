"""Refusals and drops in the audit: counted lines, the first of a source at once, then one a minute."""

import asyncio
import json
import time
from contextlib import suppress
from pathlib import Path

import pytest

from relay.audit.log import AuditLog
from relay.audit.refusal_counts import MAX_AUTHENTICATED, MAX_UNAUTHENTICATED, RefusalCounter, RefusalEvent
from relay.audit.writer import AuditWriter
from tests.fakes.disk import full_disk
from tests.fakes.fuse_disk import fuse_disk
from tests.fakes.hub import Hub
from tests.fakes.polling import BOUND_S
from tests.fakes.signer import NOW_MS


def test_what_happens_often_is_one_line_with_a_count(hub: Hub) -> None:
    for _ in range(3):
        hub.refusals.count(RefusalEvent.TOKEN_REFUSED, "192.0.2.1", "expired")
    hub.refusals.count(RefusalEvent.TOKEN_REFUSED, "192.0.2.1", "signature", times=2)
    hub.refusals.write()
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
    hub.refusals.count(RefusalEvent.NODE_REFUSED, "192.0.2.1", "chain")
    hub.refusals.write()
    hub.refusals.write()
    assert len(hub.audited()) == 1


def test_a_slow_disk_leaves_the_rest_for_the_next_time(hub: Hub) -> None:
    def slow() -> float:
        hub.seconds.now += 0.05  # between two lines
        return hub.seconds.now

    refusals = RefusalCounter(hub.audit, hub.log, slow, hub.ulids.new)
    for number in range(10):
        refusals.count(RefusalEvent.NODE_REFUSED, f"192.0.2.{number}", "chain")
    refusals.write_due(0.1)
    assert 0 < len(hub.audited()) < 10
    refusals.write()
    assert len(hub.audited()) == 10


def sources(hub: Hub) -> list[tuple[str, int]]:
    return [(line["source"], line["count"]) for line in hub.audited()]


@pytest.mark.parametrize(
    ("event", "places"),
    [(RefusalEvent.TOKEN_REFUSED, MAX_UNAUTHENTICATED), (RefusalEvent.FRAME_DROPPED, MAX_AUTHENTICATED)],
)
def test_so_many_sources_are_named_in_a_minute_and_the_rest_are_others(
    hub: Hub, event: RefusalEvent, places: int
) -> None:
    for _ in range(2):  # seconds
        for number in range(1500):
            hub.refusals.count(event, f"source {number}", "expired")
        hub.refusals.write_due()
        hub.seconds.now += 1
    named = [(f"source {number}", 1) for number in range(places)]
    assert sources(hub) == [*named, ("others", 1500 - places)]
    hub.seconds.now += 60
    hub.refusals.write_due()
    assert sources(hub) == [*named, ("others", 1500 - places)] * 2


def test_unproven_cannot_take_the_place_of_who_has_proven_who_it_is(hub: Hub) -> None:
    for number in range(1500):
        hub.refusals.count(RefusalEvent.MANIFEST_REFUSED, f"invented {number}", "chain")
    hub.refusals.count(RefusalEvent.CALL_REFUSED, "acme/agent", "E_RATE_LIMITED")
    hub.refusals.write_due()
    assert ("acme/agent", 1) in sources(hub)


def test_the_first_line_of_a_source_is_written_at_once_and_the_next_after_a_minute(hub: Hub) -> None:
    firsts = []
    for _ in range(121):
        firsts.append(hub.refusals.count(RefusalEvent.TOKEN_REFUSED, "192.0.2.1", "expired"))
        hub.refusals.write_due()
        hub.seconds.now += 1
    assert sources(hub) == [("192.0.2.1", 1), ("192.0.2.1", 60), ("192.0.2.1", 60)]
    assert [second for second, first in enumerate(firsts) if first] == [0, 1, 61]


def test_a_source_that_was_quiet_for_a_minute_is_evicted(hub: Hub) -> None:
    for number in range(MAX_UNAUTHENTICATED):
        hub.refusals.count(RefusalEvent.TOKEN_REFUSED, f"source {number}", "expired")
    hub.refusals.write_due()
    hub.seconds.now += 60
    hub.refusals.write_due()
    hub.refusals.count(RefusalEvent.TOKEN_REFUSED, "another", "expired")
    hub.refusals.write_due()
    assert sources(hub)[MAX_UNAUTHENTICATED:] == [("another", 1)]


def test_the_addresses_of_one_subscriber_are_one_source(hub: Hub) -> None:
    for address in ("2001:db8:1:2::1", "2001:db8:1:2:ffff::1", "192.0.2.1", "::ffff:192.0.2.1", "127.0.0.1"):
        hub.refusals.count(RefusalEvent.TOKEN_REFUSED, address, "expired")
    hub.refusals.write_due()
    assert sources(hub) == [("2001:db8:1:2::/64", 2), ("192.0.2.1", 2), ("127.0.0.1", 1)]


def test_the_room_that_calls_need_is_not_written_into(tmp_path: Path, hub: Hub) -> None:
    audit_file = tmp_path / "small" / "audit.jsonl"
    audit_file.parent.mkdir()
    full = AuditLog(audit_file, hub.clock, reserved_bytes=1 << 60)  # no disk has so much
    audit = AuditWriter(full, hub.clock, hub.log)
    refusals = RefusalCounter(audit, hub.log, hub.seconds, hub.ulids.new)
    for _ in range(3):
        refusals.count(RefusalEvent.TOKEN_REFUSED, "192.0.2.1", "expired")
        refusals.write_due()
        hub.seconds.now += 60
    assert audit_file.read_text() == ""
    assert audit.available
    audit.write(decision="allow")
    assert len(audit_file.read_text().splitlines()) == 1
    (line,) = hub.lines.entries("refusals not recorded yet")
    assert "kept for calls" in line["reason"]
    audit.close()
    roomy = AuditWriter(AuditLog(audit_file, hub.clock), hub.clock, hub.log)
    refusals = RefusalCounter(roomy, hub.log, hub.seconds, hub.ulids.new)
    refusals.count(RefusalEvent.TOKEN_REFUSED, "192.0.2.1", "expired")
    refusals.write_due()
    assert len(audit_file.read_text().splitlines()) == 2
    roomy.close()


def test_what_cannot_be_written_is_kept_and_counted_on(hub: Hub) -> None:
    hub.refusals.count(RefusalEvent.NODE_REFUSED, "192.0.2.1", "chain")
    with full_disk():
        hub.refusals.write()
    hub.refusals.count(RefusalEvent.NODE_REFUSED, "192.0.2.1", "chain")
    hub.refusals.write()
    [line] = hub.audited()
    assert line["count"] == 2


@pytest.mark.integration
def test_what_a_disk_that_stalls_takes_late_is_counted_once(hub: Hub, tmp_path: Path) -> None:
    with fuse_disk(tmp_path / "disk") as disk:
        audit = AuditWriter(AuditLog(disk.path / "audit.jsonl", hub.clock), hub.clock, hub.log)
        refusals = RefusalCounter(audit, hub.log, hub.seconds, hub.ulids.new)
        refusals.count(RefusalEvent.NODE_REFUSED, "192.0.2.1", "chain")
        disk.stall()
        refusals.write_due()  # for a tenth of a second
        disk.resume()
        audit.flush(BOUND_S)
        refusals.write()
        audit.close()
        lines = (disk.path / "audit.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["count"] for line in lines] == [1]


async def test_counts_are_written_once_an_interval_and_when_it_ends(hub: Hub) -> None:
    refusals = RefusalCounter(hub.audit, hub.log, time.monotonic, hub.ulids.new, interval_s=0.001)
    running = asyncio.create_task(refusals.run())
    refusals.count(RefusalEvent.NODE_REFUSED, "192.0.2.1", "chain")
    async with asyncio.timeout(30):
        while not await asyncio.to_thread(hub.audited):
            continue
    refusals.count(RefusalEvent.NODE_REFUSED, "192.0.2.1", "late")
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    assert [line["reason"] for line in hub.audited()] == ["chain", "late"]
