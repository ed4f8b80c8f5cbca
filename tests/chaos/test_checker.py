"""The checker finds each sort of violation that is planted, and nothing in a history that is right."""

from dataclasses import replace

import pytest

from tests.chaos.checker import DEADLINE_MS, HEARTBEAT_MS, TOLERANCE_MS, violations
from tests.chaos.history import (
    AGENT_LINK,
    RELAY,
    Answer,
    Call,
    Decision,
    Disturbance,
    Healing,
    History,
    Lag,
    Outcome,
    Run,
)

NOW = 1_800_000_000_000
LATEST = NOW + DEADLINE_MS + TOLERANCE_MS

ANSWERED = Call("aa", "node-0", NOW, NOW + 20, (Answer("aa", "ok", "aa", "node-0"),))
REFUSED = Call("bb", "node-1", NOW, NOW + 20, (Answer("bb", "E_NODE_OFFLINE"),))
RIGHT = History(
    calls=[ANSWERED, REFUSED],
    decisions=[Decision("A", NOW, allowed=True), Decision("B", NOW, allowed=False)],
    outcomes=[Outcome("A", NOW + 10, 10.0)],
    runs=[Run("aa", "A", "node-0")],
    healings=[Healing("node-0", NOW, NOW + HEARTBEAT_MS)],
)


def sorts(history: History) -> list[str]:
    return [violation.sort for violation in violations(history)]


def broken(call: Call, ended_ms: int | None = NOW + 20) -> History:
    return replace(RIGHT, calls=[replace(call, ended_ms=ended_ms, answers=())], runs=[])


def late(ended_ms: int) -> History:
    return replace(RIGHT, calls=[replace(ANSWERED, ended_ms=ended_ms), REFUSED])


def disturbed(history: History, what: str, began_ms: int = NOW - 50, ended_ms: int = NOW + 5) -> History:
    return replace(history, disturbances=[Disturbance(what, began_ms, ended_ms)])


def lagging(history: History, lag_ms: float, at_ms: int = NOW + 5) -> History:
    return replace(history, lags=[Lag(at_ms, lag_ms)])


def test_a_history_that_is_right_has_no_violation() -> None:
    assert violations(RIGHT) == []


@pytest.mark.parametrize(
    ("sort", "history"),
    [
        pytest.param(
            "two outcomes",
            replace(RIGHT, calls=[replace(ANSWERED, answers=ANSWERED.answers * 2), REFUSED]),
            id="two answers",
        ),
        pytest.param(
            "two outcomes",
            replace(RIGHT, outcomes=[*RIGHT.outcomes, Outcome("A", NOW + 12, 12.0)]),
            id="two outcomes in the audit",
        ),
        pytest.param("no outcome", broken(ANSWERED), id="a broken connection without a cause"),
        pytest.param("no outcome", broken(ANSWERED, None), id="a caller that gave up"),
        pytest.param("no outcome", replace(RIGHT, outcomes=[]), id="no outcome in the audit"),
        pytest.param("late outcome", late(LATEST + 1), id="late at its caller"),
        pytest.param(
            "late outcome",
            replace(RIGHT, outcomes=[Outcome("A", LATEST + 1, DEADLINE_MS + TOLERANCE_MS + 1.0)]),
            id="late in the audit",
        ),
        pytest.param("ran twice", replace(RIGHT, runs=[*RIGHT.runs, Run("aa", "A", "node-0")]), id="same id"),
        pytest.param(
            "ran twice", replace(RIGHT, runs=[*RIGHT.runs, Run("aa", "C", "node-0")]), id="another id"
        ),
        pytest.param(
            "wrong answer",
            replace(RIGHT, calls=[replace(ANSWERED, answers=(Answer("aa", "ok", "bb", "node-0"),)), REFUSED]),
            id="another message",
        ),
        pytest.param(
            "wrong answer",
            replace(RIGHT, calls=[replace(ANSWERED, answers=(Answer("aa", "ok", "aa", "node-1"),)), REFUSED]),
            id="of another node",
        ),
        pytest.param(
            "wrong answer",
            replace(RIGHT, calls=[ANSWERED, replace(REFUSED, answers=(Answer("aa", "E_NODE_OFFLINE"),))]),
            id="to another request",
        ),
        pytest.param("wrong answer", replace(RIGHT, runs=[Run("aa", "A", "node-1")]), id="run by another"),
        pytest.param("wrong answer", replace(RIGHT, runs=[Run("cc", "C", "node-1")]), id="run of no call"),
        pytest.param(
            "ran after refused", replace(RIGHT, runs=[Run("bb", "C", "node-1")]), id="refused to its caller"
        ),
        pytest.param(
            "ran after refused", replace(RIGHT, runs=[Run("aa", "B", "node-0")]), id="denied in the audit"
        ),
        pytest.param("not healed", replace(RIGHT, healings=[Healing("node-0", NOW, None)]), id="never"),
        pytest.param(
            "not healed",
            replace(RIGHT, healings=[Healing("node-0", NOW, NOW + HEARTBEAT_MS + 1)]),
            id="after a heartbeat",
        ),
    ],
)
def test_a_planted_violation_is_found(sort: str, history: History) -> None:
    assert sorts(history) == [sort]


@pytest.mark.parametrize("what", [AGENT_LINK, RELAY])
@pytest.mark.parametrize("ended_ms", [NOW + 20, None])
def test_a_caller_that_was_cut_off_does_not_know_the_outcome(what: str, ended_ms: int | None) -> None:
    assert sorts(disturbed(broken(ANSWERED, ended_ms), what)) == []


@pytest.mark.parametrize("what", ["node-relay", "node-0", "broker"])
def test_a_fault_elsewhere_excuses_no_broken_connection(what: str) -> None:
    assert sorts(disturbed(broken(ANSWERED), what)) == ["no outcome"]


def test_a_fault_of_another_time_excuses_no_broken_connection() -> None:
    before = disturbed(broken(ANSWERED), RELAY, NOW - 2000, NOW - 1000)
    assert sorts(before) == ["no outcome"]
    after = disturbed(broken(ANSWERED), RELAY, NOW + 1000, NOW + 2000)
    assert sorts(after) == ["no outcome"]


def test_a_relay_that_ended_has_not_recorded_every_outcome() -> None:
    assert sorts(disturbed(replace(RIGHT, outcomes=[]), RELAY)) == []
    assert sorts(disturbed(replace(RIGHT, outcomes=[]), AGENT_LINK)) == ["no outcome"]


def test_the_callers_own_link_makes_an_outcome_late_and_a_relay_does_not() -> None:
    assert sorts(disturbed(late(LATEST + 1), AGENT_LINK)) == []
    assert sorts(disturbed(late(LATEST + 1), RELAY)) == ["late outcome"]


def test_a_measured_lag_moves_the_deadline_by_as_much_and_no_more() -> None:
    assert sorts(lagging(late(LATEST + 100), 100)) == []
    assert sorts(lagging(late(LATEST + 101), 100)) == ["late outcome"]
    assert sorts(lagging(late(LATEST + 100), 100, at_ms=NOW - 1)) == ["late outcome"]
