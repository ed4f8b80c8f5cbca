import json
import tracemalloc
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.delivery import (
    ANSWER_BYTES,
    COMMAND_BYTES,
    FEWEST_COMMANDS,
    LONGEST_DEADLINE_MS,
    MAX_ANSWER_BYTES,
    MOST_COMMANDS_PER_S,
    AnswerCache,
    CommandStatus,
    PendingCommands,
    TransitGauge,
    commands_to_know,
)
from schemas.payloads import CmdAck
from schemas.registry import SchemaRegistry
from tests.fakes.clock import FakeClock
from tests.fakes.frames import COMMAND, message_id
from tests.fakes.signer import NOW_MS

PONG: CmdAck = {"ok": True, "result": {"message": "ping"}}


# --- the commands that the relay has sent --------------------------------------------------------------


def pending_commands(*entries: tuple[str, int]) -> PendingCommands[str]:
    pending: PendingCommands[str] = PendingCommands()
    for msg_id, expires_at_ms in entries:
        pending.add(msg_id, COMMAND, expires_at_ms, f"caller of {msg_id}")
    return pending


def test_a_command_is_settled_once() -> None:
    pending = pending_commands(("a", NOW_MS + 2000))
    assert pending.pop("a") == "caller of a"
    assert pending.pop("a") is None


def test_an_unknown_command_is_not_settled() -> None:
    pending = pending_commands(("a", NOW_MS + 2000))
    assert pending.pop("b") is None
    assert list(pending) == ["a"]


def test_pending_commands_are_counted_and_listed() -> None:
    pending = pending_commands(("a", NOW_MS + 2000), ("b", NOW_MS + 1000))
    assert len(pending) == 2
    assert list(pending) == ["a", "b"]
    pending.pop("a")
    assert len(pending) == 1
    assert list(pending) == ["b"]
    assert list(PendingCommands[str]()) == []


def test_commands_can_be_settled_while_they_are_listed() -> None:
    pending = pending_commands(("a", NOW_MS), ("b", NOW_MS), ("c", NOW_MS))
    assert [pending.pop(msg_id) for msg_id in pending] == ["caller of a", "caller of b", "caller of c"]
    assert len(pending) == 0


def test_a_command_is_sent_again_under_its_own_id_with_what_is_left_of_its_budget() -> None:
    clock = FakeClock(NOW_MS)
    pending = pending_commands(("a", clock() + 2000))
    clock.advance(1500)
    assert pending.renewed("a", clock()) == {**COMMAND, "deadline_ms": 500, "sent_at_ms": NOW_MS + 1500}


def test_a_command_whose_deadline_has_passed_is_not_sent_again_and_still_waits() -> None:
    pending = pending_commands(("over", NOW_MS), ("just-now", NOW_MS + 1), ("later", NOW_MS + 5))
    assert [msg_id for msg_id in pending if pending.renewed(msg_id, NOW_MS)] == ["just-now", "later"]
    assert list(pending) == ["over", "just-now", "later"]


def test_a_settled_command_is_not_sent_again() -> None:
    pending = pending_commands(("a", NOW_MS + 2000))
    pending.pop("a")
    assert pending.renewed("a", NOW_MS) is None


def test_sending_again_leaves_the_pending_commands_unchanged() -> None:
    pending = pending_commands(("a", NOW_MS + 2000))
    first = pending.renewed("a", NOW_MS + 500)
    assert pending.renewed("a", NOW_MS + 500) == first
    assert COMMAND["deadline_ms"] == 2000
    assert pending.pop("a") == "caller of a"


# --- the node's cache of answers ----------------------------------------------------------------------

LIFE_MS = 5000
OVER_MS = (NOW_MS + LIFE_MS) // 1000 * 1000 + 1000
"""When a command is over that came at ``NOW_MS``: at the end of the second in which its deadline is."""
PONG_BYTES = ANSWER_BYTES + len('{"ok":true,"result":{"message":"ping"}}')
A, B, C, D = (message_id(number) for number in range(1, 5))


def cache_of(commands: int, answers: int = 0) -> AnswerCache:
    """Return a cache with capacity for so many commands, and for so many answers."""
    return AnswerCache(commands, answers * PONG_BYTES)


def admitted(cache: AnswerCache, *msg_ids: str, now_ms: int = NOW_MS) -> list[CommandStatus]:
    return [cache.admit(msg_id, now_ms + LIFE_MS, now_ms) for msg_id in msg_ids]


def ran(cache: AnswerCache, *msg_ids: str) -> None:
    for msg_id in msg_ids:
        assert admitted(cache, msg_id) == [CommandStatus.NEW]
        cache.remember(msg_id, PONG)


def test_a_command_is_new_once() -> None:
    cache = AnswerCache()
    assert admitted(cache, A, A) == [CommandStatus.NEW, CommandStatus.SEEN]


def test_a_command_that_runs_has_no_answer_yet() -> None:
    cache = AnswerCache()
    assert not cache.runs(A)
    admitted(cache, A)
    assert cache.recall(A) is None
    assert cache.runs(A)
    assert cache.recall("never seen") is None


def test_a_command_that_ran_is_answered_from_memory_and_never_runs_again() -> None:
    cache = AnswerCache()
    ran(cache, A)
    assert admitted(cache, A) == [CommandStatus.SEEN]
    assert cache.recall(A) == PONG
    assert not cache.runs(A)


def test_answers_are_evicted_for_newer_ones_and_their_commands_stay_known() -> None:
    cache = cache_of(3, answers=2)
    ran(cache, B, A, C)  # the ids of two relays do not ascend
    assert [cache.recall(msg_id) for msg_id in (B, A, C)] == [None, PONG, PONG]
    assert admitted(cache, B, A, C) == [CommandStatus.FORGOTTEN, CommandStatus.SEEN, CommandStatus.SEEN]
    assert not cache.runs(B)


def test_a_command_is_known_until_its_deadline_whatever_comes() -> None:
    cache = cache_of(2)
    ran(cache, B, A)
    assert admitted(cache, C, now_ms=OVER_MS - 1) == [CommandStatus.FULL]
    assert admitted(cache, A, B, now_ms=OVER_MS - 1) == [CommandStatus.FORGOTTEN] * 2
    assert admitted(cache, C, D, now_ms=OVER_MS) == [CommandStatus.NEW] * 2


def test_a_command_that_runs_is_known_beyond_its_deadline() -> None:
    cache = cache_of(1)
    admitted(cache, A)
    assert admitted(cache, B, A, now_ms=OVER_MS) == [CommandStatus.NEW, CommandStatus.SEEN]


@given(st.lists(st.integers(0, 999), unique=True, max_size=40))
def test_ids_are_known_in_whichever_order_they_come(numbers: list[int]) -> None:
    cache = cache_of(len(numbers))
    ran(cache, *map(message_id, numbers))
    assert set(admitted(cache, *map(message_id, numbers))) <= {CommandStatus.FORGOTTEN}
    assert admitted(cache, message_id(1000)) == [CommandStatus.FULL]


def test_the_longest_answers_take_a_mebibyte_too() -> None:
    cache = AnswerCache()
    disks = [
        {"mount": f"/mnt/{n}", "fs_type": "ext4", "total_bytes": 2**40, "available_bytes": n}
        for n in range(64)
    ]
    # One text of that length: JSON is what is kept, and to trace how the parts become JSON takes seconds.
    answer: CmdAck = {"ok": True, "result": {"disk": "x" * len(json.dumps(disks, separators=(",", ":")))}}
    tracemalloc.start()
    try:
        for number in range(1024):
            msg_id = f"{number:026}"
            cache.admit(msg_id, OVER_MS, NOW_MS)
            cache.remember(msg_id, answer)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken <= MAX_ANSWER_BYTES + 1024 * COMMAND_BYTES
    assert cache.recall(f"{1023:026}") == answer


@pytest.mark.parametrize("result", [{}, {"message": "x" * 30}])
def test_a_full_cache_of_short_answers_takes_no_more_than_its_bytes(result: dict[str, Any]) -> None:
    commands, answers = 1 << 12, 1 << 17
    cache = AnswerCache(commands, answers)
    tracemalloc.start()
    try:
        for number in range(3 * commands):
            msg_id, now_ms = f"{number:026}", NOW_MS + 2 * number
            assert cache.admit(msg_id, now_ms + LIFE_MS, now_ms) is CommandStatus.NEW
            cache.remember(msg_id, {"ok": True, "result": result})
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken <= commands * COMMAND_BYTES + answers


@pytest.mark.parametrize(
    ("announced", "commands"),
    [(15, FEWEST_COMMANDS), (6000, 48_000), (MOST_COMMANDS_PER_S, 131_072), (1e9, 131_072)],
)
def test_a_node_knows_as_many_commands_as_it_announces(announced: float, commands: int) -> None:
    assert commands_to_know(announced) == commands


def test_all_that_a_relay_lets_through_is_known_as_long_as_it_lives() -> None:
    rate, now_ms = 1000, NOW_MS + 999
    cache = AnswerCache(commands_to_know(rate))
    arrivals = [now_ms] * rate  # the burst of the relay that the node leaves
    arrivals += [now_ms] * rate + [now_ms + number for number in range(2 * LIFE_MS)]
    for number, arrives_ms in enumerate(arrivals):
        assert admitted(cache, message_id(number), now_ms=arrives_ms) == [CommandStatus.NEW]
        cache.remember(message_id(number), PONG)


def test_a_command_that_was_refused_for_want_of_room_is_not_remembered() -> None:
    cache = cache_of(1, answers=1)
    assert admitted(cache, A, B) == [CommandStatus.NEW, CommandStatus.FULL]
    cache.remember(B, PONG)
    assert cache.recall(B) is None
    assert admitted(cache, B) == [CommandStatus.FULL]


def test_an_answer_to_a_command_that_never_came_is_not_remembered() -> None:
    cache = AnswerCache()
    cache.remember(A, PONG)
    assert cache.recall(A) is None
    assert admitted(cache, A) == [CommandStatus.NEW]


def test_an_answer_that_takes_the_place_of_another_gives_its_room_back() -> None:
    cache = cache_of(2, answers=2)
    ran(cache, A, B)
    for _ in range(5):
        cache.remember(A, PONG)
    assert [cache.recall(msg_id) for msg_id in (A, B)] == [PONG, PONG]


def test_an_answer_that_is_larger_than_the_memory_evicts_no_other() -> None:
    cache = cache_of(2, answers=1)
    ran(cache, A)
    admitted(cache, B)
    cache.remember(B, {"ok": True, "result": {"message": "x" * PONG_BYTES}})
    assert admitted(cache, A, B) == [CommandStatus.SEEN, CommandStatus.FORGOTTEN]


@pytest.mark.parametrize("answer", [{"ok": object()}, {"ok": float("nan")}])
def test_what_is_not_json_is_refused_and_its_command_still_runs(answer: Any) -> None:
    cache = cache_of(1, answers=1)
    admitted(cache, A)
    with pytest.raises((TypeError, ValueError)):
        cache.remember(A, answer)
    assert cache.runs(A)
    cache.remember(A, PONG)
    assert cache.recall(A) == PONG


@given(
    st.lists(
        st.tuples(st.sampled_from(["admit", "answer", "wait"]), st.integers(1, 8)),
        min_size=1,
        max_size=60,
    )
)
def test_no_command_runs_a_second_time_before_its_deadline(steps: list[tuple[str, int]]) -> None:
    cache, now_ms = cache_of(3, answers=1), NOW_MS
    over: dict[str, int] = {}
    running: set[str] = set()
    for step, number in steps:
        msg_id = message_id(number)
        match step:
            case "admit":
                known = msg_id in running or over.get(msg_id, 0) > now_ms
                admission = cache.admit(msg_id, now_ms + 1000, now_ms)
                assert not (known and admission in {CommandStatus.NEW, CommandStatus.FULL})
                if admission is CommandStatus.FULL:
                    assert len([each for each in over if over[each] > now_ms - 1000]) >= 3
                if admission is CommandStatus.NEW:
                    running.add(msg_id)
                    over[msg_id] = now_ms + 1000
                assert cache.runs(msg_id) is (msg_id in running)
            case "answer":
                cache.remember(msg_id, PONG)
                running.discard(msg_id)
            case _:
                now_ms += 400


# --- the way ------------------------------------------------------------------------------------------


def heartbeats() -> Iterator[int]:
    """Return when the relay sends its acknowledgements."""
    return count(NOW_MS, 60_000)


def test_the_first_message_stands_for_an_instant_journey() -> None:
    assert TransitGauge().delay_ms(NOW_MS, NOW_MS + 40) == 0


@pytest.mark.parametrize(
    "skew_ms", [0, 3_600_000, -3_600_000], ids=["agreeing", "an-hour-ahead", "an-hour-behind"]
)
def test_delay_is_what_exceeds_the_fastest_journey_whatever_the_clocks_say(skew_ms: int) -> None:
    gauge = TransitGauge()
    ours = NOW_MS + skew_ms
    gauge.delay_ms(NOW_MS, ours + 20)
    assert gauge.delay_ms(NOW_MS + 1000, ours + 1000 + 20) == 0
    assert gauge.delay_ms(NOW_MS + 2000, ours + 2000 + 320) == 300
    assert gauge.delay_ms(NOW_MS + 3000, ours + 3000 + 5) == 0
    assert gauge.delay_ms(NOW_MS + 4000, ours + 4000 + 20) == 15


@given(st.integers(-(10**9), 10**9), st.lists(st.integers(0, 60_000), min_size=1, max_size=20))
def test_a_delay_is_never_negative_and_never_more_than_the_journey(skew_ms: int, journeys: list[int]) -> None:
    gauge = TransitGauge()
    for journey in journeys:
        assert 0 <= gauge.delay_ms(NOW_MS, NOW_MS + journey + skew_ms) <= journey


@pytest.mark.parametrize(
    "step_ms", [3_600_000, -3_600_000], ids=["our-clock-set-forward", "our-clock-set-back"]
)
def test_a_clock_that_is_set_seems_like_delay_for_two_windows_at_most(step_ms: int) -> None:
    gauge, beats = TransitGauge(), heartbeats()
    gauge.delay_ms(NOW_MS, NOW_MS + 20)
    seeming = max(step_ms, 0)
    assert gauge.delay_ms(NOW_MS + 1000, NOW_MS + 1020 + step_ms) == seeming
    gauge.renew(next(beats))
    assert gauge.delay_ms(NOW_MS + 2000, NOW_MS + 2020 + step_ms) == seeming
    gauge.renew(next(beats))
    assert gauge.delay_ms(NOW_MS + 3000, NOW_MS + 3020 + step_ms) == 0
    assert gauge.delay_ms(NOW_MS + 4000, NOW_MS + 4050 + step_ms) == 30


def test_the_fastest_journey_of_the_window_before_still_counts() -> None:
    gauge, beats = TransitGauge(), heartbeats()
    gauge.delay_ms(NOW_MS, NOW_MS + 5)
    gauge.renew(next(beats))
    assert gauge.delay_ms(NOW_MS, NOW_MS + 40) == 35
    assert gauge.delay_ms(NOW_MS, NOW_MS + 30) == 25


def test_a_journey_faster_than_those_of_the_window_before_counts_at_once() -> None:
    gauge, beats = TransitGauge(), heartbeats()
    gauge.delay_ms(NOW_MS, NOW_MS + 40)
    gauge.renew(next(beats))
    assert gauge.delay_ms(NOW_MS, NOW_MS + 10) == 0
    assert gauge.delay_ms(NOW_MS, NOW_MS + 40) == 30


def test_after_two_silent_windows_a_message_is_the_first_again() -> None:
    gauge, beats = TransitGauge(), heartbeats()
    gauge.renew(next(beats))
    assert gauge.delay_ms(NOW_MS, NOW_MS + 5) == 0
    gauge.renew(next(beats))
    gauge.renew(next(beats))
    assert gauge.delay_ms(NOW_MS, NOW_MS + 500) == 0


def test_a_clock_that_drifts_never_shows_more_delay_than_it_drifts_in_two_windows() -> None:
    gauge, beats = TransitGauge(), heartbeats()
    for heartbeat in range(100):
        gauge.renew(next(beats))
        assert gauge.delay_ms(NOW_MS, NOW_MS + 3 * heartbeat) <= 3


@given(
    st.integers(-(10**9), 10**9),
    st.lists(st.lists(st.integers(0, 60_000), max_size=5), min_size=1, max_size=8),
)
def test_a_delay_is_what_exceeds_the_fastest_journey_of_this_window_and_the_one_before(
    skew_ms: int, windows: list[list[int]]
) -> None:
    gauge, beats = TransitGauge(), heartbeats()
    before: list[int] = []
    for journeys in windows:
        for taken, journey in enumerate(journeys, 1):
            delay = gauge.delay_ms(NOW_MS, NOW_MS + journey + skew_ms)
            assert delay == journey - min(before + journeys[:taken])
        gauge.renew(next(beats))
        before = journeys


def test_a_window_is_no_shorter_than_a_command_may_live() -> None:
    gauge = TransitGauge()
    gauge.delay_ms(NOW_MS, NOW_MS + 5)
    for sent_at_ms in (NOW_MS, NOW_MS + 1, NOW_MS + LONGEST_DEADLINE_MS - 1):
        gauge.renew(sent_at_ms)
        assert gauge.delay_ms(sent_at_ms, sent_at_ms + 40) == 35
    gauge.renew(NOW_MS + LONGEST_DEADLINE_MS)
    assert gauge.delay_ms(NOW_MS, NOW_MS + 40) == 0


@given(st.data())
def test_a_command_that_the_memory_has_forgotten_is_seen_to_be_late(data: st.DataObject) -> None:
    # A command ran, its answer was lost, and it is sent again: in time, but it arrives after its deadline.
    gauge, deadline_ms = TransitGauge(), data.draw(st.integers(2, LONGEST_DEADLINE_MS))
    arrived_ms = NOW_MS + data.draw(st.integers(0, deadline_ms))
    gauge.delay_ms(NOW_MS, arrived_ms)
    forgotten_ms = arrived_ms + deadline_ms
    times = st.lists(st.integers(0, deadline_ms - 1), max_size=8)
    for sent_ms in sorted(data.draw(times)):
        # Acknowledgements between the two: each was sent before the command was sent again.
        gauge.renew(NOW_MS + sent_ms)
        gauge.delay_ms(NOW_MS + sent_ms, forgotten_ms)
    again_ms = NOW_MS + deadline_ms - 1
    budget_ms = 1 - gauge.delay_ms(again_ms, forgotten_ms)
    assert budget_ms <= 0


def test_the_longest_deadline_is_that_of_the_document() -> None:
    schema = SchemaRegistry().document("session.cmd@1.0.0")
    assert schema["properties"]["payload"]["properties"]["deadline_ms"]["maximum"] == LONGEST_DEADLINE_MS
