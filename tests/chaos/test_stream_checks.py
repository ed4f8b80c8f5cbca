"""What is planted in the streams of telemetry is found, and nothing in streams that are right."""

from dataclasses import replace

import pytest

from tests.chaos.checker import violations
from tests.chaos.history import AGENT_LINK, RELAY, Disturbance, Following, History, Sample

NOW = 1_800_000_000_000

FIRST = Sample(NOW + 5, NOW, "node-0", 1)
SECOND = Sample(NOW + 1005, NOW + 1000, "node-0", 2)
AFTER_LOSS = Sample(NOW + 4005, NOW + 4000, "node-0", 5, lost=2)
OPEN = Following("node-0", NOW, samples=[FIRST, SECOND, AFTER_LOSS])
ENDED = Following("node-1", NOW, ended_ms=NOW + 30_000, ends=["E_NODE_OFFLINE"])
BROKEN = replace(OPEN, ended_ms=NOW + 4500)


def history(*followings: Following, disturbances: tuple[Disturbance, ...] = ()) -> History:
    return History(followings=followings, disturbances=disturbances)


def with_last(sample: Sample) -> Following:
    return replace(OPEN, samples=[FIRST, SECOND, sample])


def sorts(seen: History) -> list[str]:
    return [violation.sort for violation in violations(seen)]


def test_streams_that_go_on_end_or_say_what_was_lost_are_right() -> None:
    assert sorts(history(OPEN, ENDED, replace(OPEN, samples=[]))) == []


@pytest.mark.parametrize(
    ("sort", "following"),
    [
        pytest.param("wrong sample", with_last(replace(AFTER_LOSS, node_id="node-1")), id="of another node"),
        pytest.param("sample twice", with_last(replace(AFTER_LOSS, ts_ms=SECOND.ts_ms)), id="the same again"),
        pytest.param("sample twice", with_last(replace(AFTER_LOSS, ts_ms=FIRST.ts_ms)), id="an older one"),
        pytest.param("loss not counted", with_last(replace(AFTER_LOSS, lost=0)), id="a gap"),
        pytest.param("loss not counted", with_last(replace(AFTER_LOSS, lost=3)), id="too many"),
        pytest.param("loss not counted", replace(OPEN, samples=[SECOND]), id="the first"),
        pytest.param("stream without end", replace(OPEN, is_silent=True), id="silence"),
        pytest.param("stream without end", BROKEN, id="a broken connection without a cause"),
        pytest.param("two outcomes", replace(ENDED, ends=["E_NODE_OFFLINE", "ok"]), id="two ends"),
    ],
)
def test_a_planted_violation_is_found(sort: str, following: Following) -> None:
    assert sorts(history(following)) == [sort]


@pytest.mark.parametrize("what", [AGENT_LINK, RELAY])
def test_a_follower_that_was_cut_off_since_the_newest_sample_sees_no_end(what: str) -> None:
    cut = Disturbance(what, NOW + 4100, NOW + 4200)
    assert sorts(history(BROKEN, disturbances=(cut,))) == []
    before = Disturbance(what, NOW + 1100, NOW + 1200)
    assert sorts(history(BROKEN, disturbances=(before,))) == ["stream without end"]


def test_a_fault_of_another_relay_excuses_no_broken_stream() -> None:
    elsewhere = replace(BROKEN, link="agent-relay-2", relay="relay-2")
    for what, expected in ((AGENT_LINK, 1), (RELAY, 1), ("agent-relay-2", 0), ("relay-2", 0)):
        cut = Disturbance(what, NOW + 4100, NOW + 4200)
        assert sorts(history(elsewhere, disturbances=(cut,))) == ["stream without end"] * expected


def test_a_fault_of_the_node_excuses_no_broken_stream() -> None:
    cut = Disturbance("node-relay", NOW + 4100, NOW + 4200)
    assert sorts(history(BROKEN, disturbances=(cut,))) == ["stream without end"]
