"""The checker finds each sort of violation that is planted, and nothing in a history that is right."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.chaos.checker import HEARTBEAT_MS, violations
from tests.chaos.evidence import TOLERANCE_MS
from tests.chaos.history import (
    AGENT_LINK,
    DEADLINE_MS,
    NODE_LINK,
    RELAY,
    Answer,
    Call,
    Decision,
    Disturbance,
    Fault,
    Healing,
    History,
    Lag,
    Outcome,
    Recorded,
    Run,
)

NOW = 1_800_000_000_000
REMOTE_MS = 5000
LATEST = NOW + DEADLINE_MS + TOLERANCE_MS

ANSWERED = Call("aa", "node-0", NOW, NOW + 20, (Answer("aa", "ok", "aa", "node-0"),))
REFUSED = Call("bb", "node-1", NOW, NOW + 20, (Answer("bb", "E_NODE_OFFLINE"),))
RIGHT = History(
    calls=[ANSWERED, REFUSED],
    decisions=[Decision("A", NOW, allowed=True), Decision("B", NOW, allowed=False)],
    outcomes=[Outcome("A", NOW + 10, 10.0)],
    runs=[Run("aa", "A", "node-0")],
    healings=[Healing("node-0", NOW, NOW + HEARTBEAT_MS + TOLERANCE_MS)],
)


def sorts(history: History) -> list[str]:
    return [violation.sort for violation in violations(history)]


def broken(call: Call) -> History:
    return replace(RIGHT, calls=[replace(call, answers=())], runs=[])


def given_up(call: Call) -> History:
    waiting = replace(call, ended_ms=NOW + 10_000, answers=(), is_given_up=True)
    return replace(RIGHT, calls=[waiting], runs=[])


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
        pytest.param("no outcome", given_up(ANSWERED), id="a caller that gave up"),
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
            replace(RIGHT, healings=[Healing("node-0", NOW, NOW + HEARTBEAT_MS + TOLERANCE_MS + 1)]),
            id="after a heartbeat",
        ),
        pytest.param(
            "unexpected exception", replace(RIGHT, faults=[Fault("relay", "ValueError")]), id="an exception"
        ),
    ],
)
def test_a_planted_violation_is_found(sort: str, history: History) -> None:
    assert sorts(history) == [sort]


@pytest.mark.parametrize("what", [AGENT_LINK, RELAY])
@pytest.mark.parametrize("history", [broken(ANSWERED), given_up(ANSWERED)], ids=["broken", "given up"])
def test_a_caller_that_was_cut_off_does_not_know_the_outcome(what: str, history: History) -> None:
    assert sorts(disturbed(history, what)) == []


def test_a_caller_that_gave_up_during_a_lag_had_to_wait() -> None:
    assert sorts(lagging(given_up(ANSWERED), 10_000 - DEADLINE_MS - TOLERANCE_MS)) == []
    assert sorts(lagging(given_up(ANSWERED), 10_000 - DEADLINE_MS - TOLERANCE_MS - 1)) == ["no outcome"]
    assert sorts(lagging(broken(ANSWERED), 10_000)) == ["no outcome"]


def test_a_lag_also_moves_when_a_connection_ends_after_a_fault() -> None:
    before = disturbed(broken(ANSWERED), AGENT_LINK, NOW - 2000, NOW - 1000)
    assert sorts(lagging(before, 750, at_ms=NOW - 500)) == []
    assert sorts(lagging(before, 749, at_ms=NOW - 500)) == ["no outcome"]


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


def remote(**of_call: Any) -> Call:
    """Return a call by remote tools, of which members are overridden."""
    answers = (Answer("cc", "ok", "cc", "node-0"),)
    return replace(Call("cc", "node-0", NOW, NOW + 20, answers, NODE_LINK, REMOTE_MS), **of_call)


def by_runtime(call: Call, *events: str) -> History:
    runs = [*RIGHT.runs, Run("cc", "C", "node-0")]
    recorded = [Recorded("cc", event) for event in events or ("started", "ended")]
    return replace(RIGHT, calls=[*RIGHT.calls, call], runs=runs, recorded=recorded)


def test_a_call_by_remote_tools_that_is_recorded_once_is_right() -> None:
    assert sorts(by_runtime(remote())) == []
    assert (
        sorts(replace(by_runtime(remote(answers=(Answer("cc", "unsent"),)), "refused"), runs=RIGHT.runs))
        == []
    )


@pytest.mark.parametrize(
    ("sort", "history"),
    [
        pytest.param("record without end", by_runtime(remote(), "started"), id="no end"),
        pytest.param(
            "record without end",
            by_runtime(remote(), "started", "started", "ended", "ended"),
            id="two attempts",
        ),
        pytest.param(
            "record without end", by_runtime(remote(), "refused", "started", "ended"), id="refused too"
        ),
        pytest.param("ran after refused", by_runtime(remote(answers=(Answer("cc", "unsent"),))), id="unsent"),
        pytest.param("no outcome", by_runtime(remote(answers=())), id="unknown without a cause"),
        pytest.param(
            "late outcome",
            disturbed(by_runtime(remote(ended_ms=NOW + REMOTE_MS + TOLERANCE_MS + 1)), NODE_LINK),
            id="late, also where its link is disturbed",
        ),
    ],
)
def test_what_is_planted_in_a_call_by_remote_tools_is_found(sort: str, history: History) -> None:
    assert sorts(history) == [sort]


def test_a_runtime_whose_own_link_was_disturbed_does_not_know_the_outcome() -> None:
    assert sorts(disturbed(by_runtime(remote(answers=())), NODE_LINK)) == []
    assert sorts(disturbed(by_runtime(remote(answers=())), AGENT_LINK)) == ["no outcome"]


def test_what_follows_or_waits_may_last_and_have_no_outcome_when_the_relay_ends() -> None:
    lasting = replace(
        RIGHT,
        decisions=[*RIGHT.decisions, Decision("D", NOW, allowed=True, is_prompt=False)],
        outcomes=[*RIGHT.outcomes, Outcome("D", NOW + 60_000, 60_000.0, is_prompt=False)],
    )
    assert sorts(lasting) == []
    unended = replace(lasting, outcomes=RIGHT.outcomes)
    assert sorts(unended) == ["no outcome"]
    assert sorts(disturbed(unended, RELAY, NOW + 90_000, NOW + 90_000)) == []


ELSEWHERE = "relay-2"
FIRST = Call("ee", "node-0", NOW, NOW + 20, (Answer("ee", "ok", "key", "node-0", "R1"),), key="key")
REPEATED = Call(
    "ff",
    "node-0",
    NOW + 30,
    NOW + 50,
    (Answer("ff", "ok", "key", "node-0", "R1"),),
    "agent-relay-2",
    relay=ELSEWHERE,
    key="key",
)


def repeated(*calls: Call, runs: Sequence[Run] = (Run("ee", "E", "node-0"),)) -> History:
    """Return a history with calls under one key, and their runs."""
    return replace(RIGHT, calls=[*RIGHT.calls, *calls], runs=[*RIGHT.runs, *runs])


def test_a_call_that_is_repeated_by_way_of_another_relay_and_runs_once_is_right() -> None:
    assert sorts(repeated(FIRST, REPEATED)) == []
    unknown = replace(REPEATED, answers=(Answer("ff", "E_DEADLINE_EXCEEDED"),))
    assert sorts(repeated(FIRST, unknown)) == []
    offline = replace(FIRST, answers=(Answer("ee", "E_NODE_OFFLINE"),))
    assert sorts(repeated(offline, REPEATED, runs=[Run("ff", "F", "node-0")])) == []


@pytest.mark.parametrize(
    ("found", "history"),
    [
        pytest.param(
            ["two outcomes", "ran twice"],
            repeated(
                FIRST,
                replace(REPEATED, answers=(Answer("ff", "ok", "key", "node-0", "R2"),)),
                runs=[Run("ee", "E", "node-0"), Run("ff", "F", "node-0")],
            ),
            id="two outcomes by way of two relays",
        ),
        pytest.param(
            ["ran twice"],
            repeated(
                replace(FIRST, answers=(Answer("ee", "E_DEADLINE_EXCEEDED"),)),
                REPEATED,
                runs=[Run("ee", "E", "node-0"), Run("ff", "F", "node-0")],
            ),
            id="run again after a repetition by way of another relay",
        ),
        pytest.param(
            ["ran after refused"],
            repeated(replace(FIRST, answers=(Answer("ee", "E_NODE_OFFLINE"),))),
            id="refused for want of a relay that holds the node",
        ),
        pytest.param(
            ["wrong answer"],
            repeated(replace(FIRST, answers=(Answer("ee", "ok", "another", "node-0", "R1"),))),
            id="the outcome of another key",
        ),
        pytest.param(
            ["no outcome"],
            disturbed(repeated(FIRST, replace(REPEATED, answers=())), RELAY),
            id="a broken connection to a relay, while another ended",
        ),
        pytest.param(
            ["no outcome"],
            disturbed(
                replace(
                    RIGHT, decisions=[*RIGHT.decisions, Decision("E", NOW, allowed=True, relay=ELSEWHERE)]
                ),
                RELAY,
            ),
            id="no outcome in the audit of a relay, while another ended",
        ),
    ],
)
def test_what_is_planted_in_calls_by_way_of_several_relays_is_found(
    found: list[str], history: History
) -> None:
    assert sorts(history) == found


@pytest.mark.parametrize("what", ["agent-relay-2", ELSEWHERE])
def test_a_caller_that_its_own_relay_cut_off_does_not_know_the_outcome(what: str) -> None:
    history = repeated(FIRST, replace(REPEATED, answers=()))
    assert sorts(disturbed(history, what, NOW, NOW + 40)) == []
