"""What is planted in the requests for callers' tools is found, and nothing in requests that are right."""

from dataclasses import replace

import pytest

from tests.chaos.checker import violations
from tests.chaos.evidence import TOLERANCE_MS
from tests.chaos.history import Disturbance, History, Lag, Reply, Request, Served
from tests.chaos.lent_checks import LONGEST_MS

NOW = 1_800_000_000_000
LATEST = NOW + LONGEST_MS + TOLERANCE_MS

REPLY = Reply("ok", "aa", "ant", "r-1")
ANSWERED = Request("aa", "ant", "id-0", "node-0", NOW, NOW + 20, [REPLY])
SERVED = Served("r-1", "aa", "ant", "id-0", accepted=1)
OTHER = Request("bb", "bee", "id-1", "node-1", NOW, NOW + 3010, [Reply("E_DEADLINE_EXCEEDED")])
OTHER_SERVED = Served("r-2", "bb", "bee", "id-1")
RIGHT = History(requests=[ANSWERED, OTHER], served=[SERVED, OTHER_SERVED])


def sorts(history: History) -> list[str]:
    return [violation.sort for violation in violations(history)]


def requested(request: Request) -> History:
    return replace(RIGHT, requests=[request, OTHER])


def replied(reply: Reply) -> History:
    return requested(replace(ANSWERED, replies=[reply]))


GIVEN_UP = requested(replace(ANSWERED, ended_ms=LATEST + 100, replies=[], is_given_up=True))


def served(*all_served: Served) -> History:
    return replace(RIGHT, served=[*all_served, OTHER_SERVED])


def test_requests_that_end_once_are_right() -> None:
    assert sorts(RIGHT) == []


@pytest.mark.parametrize(
    ("sort", "history"),
    [
        pytest.param("two outcomes", requested(replace(ANSWERED, replies=[REPLY, REPLY])), id="two replies"),
        pytest.param("no outcome", GIVEN_UP, id="an agent that gave up"),
        pytest.param("no outcome", requested(replace(ANSWERED, replies=[])), id="closed without a cause"),
        pytest.param("late outcome", requested(replace(ANSWERED, ended_ms=LATEST + 1)), id="late"),
        pytest.param("served twice", served(SERVED, replace(SERVED, request_id="r-3")), id="two requests"),
        pytest.param("answered twice", served(replace(SERVED, accepted=2)), id="two answers"),
        pytest.param("wrong caller", served(replace(SERVED, caller="bee")), id="another caller"),
        pytest.param("wrong caller", served(replace(SERVED, node_id="id-1")), id="of another node"),
        pytest.param("wrong caller", served(SERVED, Served("r-3", "cc", "ant", "id-0")), id="of none"),
        pytest.param("wrong reply", replied(replace(REPLY, token="bb")), id="another token"),
        pytest.param("wrong reply", replied(replace(REPLY, caller="bee")), id="of another caller"),
        pytest.param("wrong reply", replied(replace(REPLY, request_id="r-2")), id="of another request"),
        pytest.param("wrong reply", served(), id="of a caller that was never asked"),
    ],
)
def test_a_planted_violation_is_found(sort: str, history: History) -> None:
    assert sorts(history) == [sort]


def test_a_node_that_ended_has_closed_its_socket() -> None:
    closed = requested(replace(ANSWERED, replies=[]))
    ended = Disturbance("node-0", NOW + 10, NOW + 15)
    assert sorts(replace(closed, disturbances=[ended])) == []
    assert sorts(replace(closed, disturbances=[replace(ended, what="node-1")])) == ["no outcome"]


def test_a_measured_lag_moves_the_end_of_a_request() -> None:
    late = requested(replace(ANSWERED, ended_ms=LATEST + 100))
    assert sorts(replace(late, lags=[Lag(NOW + 5, 100)])) == []
    assert sorts(replace(late, lags=[Lag(NOW + 5, 99)])) == ["late outcome"]
    assert sorts(replace(GIVEN_UP, lags=[Lag(NOW + 5, 100)])) == []
    assert sorts(replace(GIVEN_UP, lags=[Lag(NOW + 5, 99)])) == ["no outcome"]
