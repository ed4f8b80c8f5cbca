import pytest

from relay.auth.agent_tokens import Principal
from relay.streams.telemetry.hub import Leases
from relay.streams.telemetry.stream import History, HistoryBytes, Stream, Subscription, Terms
from schemas.registry import SchemaRegistry
from tests.fakes.followed import CAP_ID, SUBSCRIBE, Followed, PlayedFrames
from tests.fakes.seconds import Seconds
from tests.fakes.signer import NODE_ID, TENANT

AGENT = Principal(TENANT, "agent", "jti", "https://relay.example", frozenset(), 0, "kid", b"")
LEASE = {"cap_id": CAP_ID, "interval_ms": 1000, "ttl_ms": 30_000}
STOP = {"cap_id": CAP_ID, "interval_ms": 1000, "ttl_ms": 0}


class Stage:
    """The leases of one stream with one subscriber."""

    def __init__(self, followed: Followed) -> None:
        tool = followed.hub.fleet.tool_of(SUBSCRIBE)
        assert tool is not None
        self.frames, self.clock = PlayedFrames(), Seconds()
        self.leases = Leases(self.frames, self.clock)
        self.stream = Stream(tool, TENANT, History(HistoryBytes()), 0.0)
        self.stream.add("a", Subscription(AGENT, 1000, None, lambda _: None, lambda _: None, 0))

    def sent(self) -> list[dict[str, object]]:
        sent, self.frames.sent = self.frames.sent, []
        return [lease for _, lease in sent]


@pytest.fixture
def stage(followed: Followed) -> Stage:
    return Stage(followed)


def test_a_lease_fits_its_frame(stage: Stage, registry: SchemaRegistry) -> None:
    stage.stream.add("b", Subscription(AGENT, 60_000, frozenset(), lambda _: None, lambda _: None, 0))
    stage.leases.update(stage.stream)
    stage.stream.remove("a")
    stage.leases.update(stage.stream)
    stage.leases.stop(stage.stream)
    document = registry.load("session.telemetry_lease@1.0.0")
    for payload in stage.sent():
        document.check({"type": "telemetry_lease", "msg_id": "0" * 26, "payload": payload})


def test_a_lease_is_sent_once_and_again_after_a_third_of_its_time(stage: Stage) -> None:
    for _ in range(3):
        stage.leases.update(stage.stream)
    assert stage.sent() == [LEASE]
    assert stage.stream.leased == Terms(1000, None)
    stage.clock.now += 9.9
    stage.leases.update(stage.stream)
    assert stage.sent() == []
    stage.clock.now += 0.1
    stage.leases.update(stage.stream)
    assert stage.sent() == [LEASE]


def test_what_was_never_leased_needs_no_end(stage: Stage) -> None:
    stage.frames.offline.add(NODE_ID)
    stage.leases.update(stage.stream)
    stage.frames.offline.clear()
    stage.leases.stop(stage.stream)
    assert stage.sent() == []


def test_an_end_that_could_not_be_sent_is_sent_later(stage: Stage) -> None:
    stage.leases.update(stage.stream)
    stage.frames.limited = True
    stage.leases.stop(stage.stream)
    stage.frames.limited = False
    stage.leases.stop_pending()
    stage.leases.stop_pending()
    assert stage.sent() == [LEASE, STOP]


def test_an_end_that_is_overtaken_by_a_subscriber_is_not_sent(stage: Stage) -> None:
    stage.leases.update(stage.stream)
    stage.frames.limited = True
    stage.leases.stop(stage.stream)
    stage.frames.limited = False
    stage.leases.update(stage.stream)
    stage.leases.stop_pending()
    assert stage.sent() == [LEASE, LEASE]


def test_the_end_is_not_sent_to_a_node_whose_connection_was_lost(stage: Stage) -> None:
    stage.leases.update(stage.stream)
    stage.frames.offline.add(NODE_ID)
    stage.leases.stop(stage.stream)
    stage.leases.lost(NODE_ID)
    stage.frames.offline.clear()
    stage.leases.stop_pending()
    assert stage.sent() == [LEASE]
