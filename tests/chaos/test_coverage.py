"""A run that has too little of something is told from one that has enough."""

from dataclasses import replace

import pytest

from tests.chaos.coverage import found_elsewhere, shortfalls
from tests.chaos.history import Answer, Call, Disturbance, History
from tests.chaos.topology import ONE_RELAY, THREE_RELAYS, End, Program
from tests.fakes.fault_proxy import LinkFault

FAULTS = 200
KINDS = (*LinkFault, *End)


def keyed(number: int, relay: Program, run: str) -> Call:
    trace_id, key = f"{relay}-{number}", f"key-{number}"
    return Call(trace_id, "node", 0, 1, (Answer(trace_id, "ok", key, "node", run),), relay=relay, key=key)


ENOUGH = History(
    calls=[
        keyed(number, relay, f"run-{number}")
        for number in range(5)
        for relay in (Program.RELAY, Program.RELAY_2)
    ],
    disturbances=[Disturbance("a link", 0, 1, kind) for kind in KINDS],
)


def test_a_run_that_has_had_enough_lacks_nothing() -> None:
    assert shortfalls(ENOUGH, FAULTS, THREE_RELAYS) == []


def test_a_short_run_need_not_have_had_every_kind_of_fault() -> None:
    assert shortfalls(replace(ENOUGH, disturbances=[]), FAULTS - 1, THREE_RELAYS) == []


@pytest.mark.parametrize("missing", KINDS)
def test_a_kind_of_fault_that_was_not_made_is_told(missing: str) -> None:
    others = [one for one in ENOUGH.disturbances if one.kind != missing]
    (lacking,) = shortfalls(replace(ENOUGH, disturbances=others), FAULTS, THREE_RELAYS)
    assert lacking == f"too few faults of the kind {missing}: 0, at least 1 are needed"


def test_calls_with_a_key_must_have_been_answered() -> None:
    unanswered = [replace(call, answers=()) for call in ENOUGH.calls]
    lacking = shortfalls(replace(ENOUGH, calls=unanswered), FAULTS, THREE_RELAYS)
    assert lacking == [
        "too few calls with a key that were answered: 0, at least 10 are needed",
        "too few keys found by way of another relay: 0, at least 5 are needed",
    ]
    # Where there is one relay, none is made.
    assert shortfalls(replace(ENOUGH, calls=[]), FAULTS, ONE_RELAY) == []


@pytest.mark.parametrize(
    "other",
    [keyed(0, Program.RELAY, "run-0"), keyed(0, Program.RELAY_2, "another run")],
    ids=["the same relay", "another run"],
)
def test_what_another_relay_has_not_answered_alike_is_not_found(other: Call) -> None:
    assert found_elsewhere(History(calls=[keyed(0, Program.RELAY, "run-0"), other])) == 0
    assert found_elsewhere(ENOUGH) == 5
