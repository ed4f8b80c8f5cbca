import json

import pytest

from relay.auth.agent_tokens import Principal
from relay.streams.telemetry.stream import History, HistoryBytes, Sample, Stream, Subscription, Terms
from tests.fakes.followed import SUBSCRIBE, Followed, sample_of
from tests.fakes.signer import TENANT

AGENT = Principal(TENANT, "agent", "jti", "https://relay.example", frozenset(), 0, "kid", b"")


@pytest.fixture
def stream(followed: Followed) -> Stream:
    tool = followed.hub.fleet.tool_of(SUBSCRIBE)
    assert tool is not None
    return Stream(tool, TENANT, History(HistoryBytes()), 0.0)


def wanting(interval_ms: int, *include: str) -> Subscription:
    parts = frozenset(include) if include else None
    return Subscription(AGENT, interval_ms, parts, lambda _: None, lambda _: None, 0)


def test_the_terms_are_the_shortest_interval_and_all_parts_that_are_wanted(stream: Stream) -> None:
    assert stream.terms() is None
    stream.add("a", wanting(5000, "cpu"))
    stream.add("b", wanting(2000, "load"))
    assert stream.terms() == Terms(2000, frozenset({"cpu", "load"}))
    stream.add("c", wanting(60_000))
    assert stream.terms() == Terms(2000, None)
    stream.add("b", wanting(3000, "cpu"))
    stream.remove("c")
    stream.remove("c")
    assert stream.terms() == Terms(3000, frozenset({"cpu"}))
    assert len(stream) == 2


@pytest.mark.parametrize(
    ("include", "members"),
    [
        (None, {"cpu", "load"}),
        (frozenset({"cpu"}), {"cpu"}),
        (frozenset({"uptime"}), set()),
        (frozenset({"cpu", "load", "disk"}), {"cpu", "load"}),
    ],
)
def test_a_sample_is_shown_with_the_parts_that_are_wanted(
    stream: Stream, include: frozenset[str] | None, members: set[str]
) -> None:
    shown = json.loads(stream.shown(Sample(1, 1, json.dumps(sample_of())), include))
    assert shown.keys() == {"ts_ms", "node_id", "uptime_s"} | members


def test_a_sample_reaches_those_for_whom_it_is_due(stream: Stream) -> None:
    taken: list[tuple[str, int]] = []
    for key, interval_ms in (("a", 1000), ("b", 3000)):
        subscription = Subscription(
            AGENT, interval_ms, None, lambda sample, key=key: taken.append((key, sample.number)),  # type: ignore[misc]
            lambda _: None, 0,
        )  # fmt: skip
        subscription.begin(0.0)
        stream.add(key, subscription)
    for second in (1, 2, 3):
        stream.take(second, "{}", float(second))
    assert taken == [("a", 1), ("a", 2), ("a", 3), ("b", 3)]
    assert stream.received_s == 3.0
