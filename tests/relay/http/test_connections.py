"""How many connections there may be, and for whom; the time that they have is tried on the server itself."""

from functools import partial

import pytest

from relay.http.connections import (
    CONNECTION_IN_STATE,
    AcceptedConnection,
    Bounds,
    ConnectionRefusal,
    Connections,
    admit,
    refusal_log,
)
from relay.observability.metrics import Metrics
from schemas.process.logs import make_logger
from tests.fakes.hub import counted
from tests.fakes.lines import LogLines
from tests.fakes.seconds import Seconds

HOME, SAME_HOME, OTHER = "2001:db8:1:2::1", "2001:db8:1:2::9", "203.0.113.7"
FEW = Bounds(total=8, unauthenticated=4, per_address=2, per_holder=3)


class FewConnections:
    """Connections with low limits, and the count of rejected ones."""

    def __init__(self) -> None:
        self._metrics = Metrics()
        self.connections = Connections(FEW, self._metrics.connections_refused)

    def begin(self, address: str) -> AcceptedConnection:
        """Return a connection, which must be accepted."""
        connection = self.connections.begin(address)
        assert connection is not None
        return connection

    def refused(self, reason: str) -> float:
        return counted(self._metrics, "connections_refused_total", reason=reason)


@pytest.fixture
async def few() -> FewConnections:
    return FewConnections()


@pytest.mark.parametrize("descriptors", [0, 64, 80, 256, 1024, 65_536])
def test_the_bounds_leave_descriptors_and_room_for_those_who_are_admitted(descriptors: int) -> None:
    bounds = Bounds.below(descriptors)
    assert bounds.total <= max(8, descriptors - 64)
    assert 1 <= bounds.per_address < bounds.unauthenticated <= bounds.total // 2
    assert 1 <= bounds.per_holder < bounds.total


@pytest.mark.parametrize("connections", [8, 9, 318])
def test_a_number_of_connections_needs_so_many_descriptors_and_not_one_fewer(connections: int) -> None:
    descriptors = Bounds.descriptors_for(connections)
    assert Bounds.below(descriptors).total == connections
    assert Bounds.below(descriptors - 1).total == max(8, connections - 1)


async def test_an_address_has_its_share_of_the_unauthenticated_and_gets_it_back(
    few: FewConnections,
) -> None:
    first, _ = few.begin(HOME), few.begin(SAME_HOME)
    assert few.connections.begin(HOME) is None
    assert few.refused("address") == 1
    few.begin(OTHER)
    first.end()
    few.begin(HOME)


async def test_whom_a_proxy_on_this_machine_stands_for_is_not_known(few: FewConnections) -> None:
    for _ in range(FEW.unauthenticated):
        few.begin("127.0.0.1")
    assert few.refused("address") == 0


async def test_of_the_unauthenticated_the_one_that_waits_longest_is_aborted_for_a_new_one(
    few: FewConnections,
) -> None:
    ended: list[int] = []
    strangers = [few.begin(f"203.0.113.{number}") for number in range(FEW.unauthenticated)]
    for number, stranger in enumerate(strangers):
        stranger.begin(partial(ended.append, number))
    strangers[0].rest()  # it is served
    assert strangers[1].admit("node")
    few.begin(OTHER)
    assert ended == []
    few.begin(OTHER)
    assert ended == [2]
    assert few.refused("strangers") == 1
    strangers[2].end()
    assert len(few.connections) == FEW.unauthenticated + 1


async def test_an_unauthenticated_one_that_is_served_is_not_aborted_for_a_new_one(
    few: FewConnections,
) -> None:
    for number in range(FEW.unauthenticated):
        few.begin(f"203.0.113.{number}").rest()
    assert few.connections.begin(OTHER) is None
    assert few.refused("strangers") == 1


async def test_who_was_admitted_does_not_count_towards_the_address(few: FewConnections) -> None:
    for number in range(FEW.total):
        assert few.begin(HOME).admit(f"node {number}")
    assert few.connections.begin(HOME) is None
    assert few.refused("total") == 1


async def test_a_holder_has_no_more_than_its_share(few: FewConnections) -> None:
    held = [few.begin("127.0.0.1") for _ in range(FEW.per_holder + 1)]
    assert [connection.admit("agent") for connection in held] == [True] * FEW.per_holder + [False]
    assert few.refused("holder") == 1
    assert held[-1].holder is None
    held[0].end()
    assert held[-1].admit("agent")


async def test_whether_a_connection_would_be_admitted_is_known_without_an_effect(few: FewConnections) -> None:
    held = [few.begin("127.0.0.1") for _ in range(FEW.per_holder)]
    another = few.begin("127.0.0.1")
    for connection in held:
        assert another.may_admit("agent")
        assert connection.admit("agent")
    assert held[0].may_admit("agent")
    assert not another.may_admit("agent")
    assert (another.holder, few.refused("holder")) == (None, 0)


async def test_a_connection_that_a_proxy_uses_for_another_agent_counts_towards_that_one(
    few: FewConnections,
) -> None:
    shared = few.begin("127.0.0.1")
    for _ in range(FEW.per_holder + 1):
        assert shared.admit("one")
        assert shared.admit("other")
    assert all(few.begin("127.0.0.1").admit("one") for _ in range(FEW.per_holder))


async def test_an_end_is_counted_once(few: FewConnections) -> None:
    connection = few.begin(HOME)
    connection.end()
    connection.end()
    assert len(few.connections) == 0
    few.begin(HOME)
    few.begin(HOME)
    assert few.connections.begin(HOME) is None


async def test_what_is_served_knows_its_connection(few: FewConnections) -> None:
    connection = few.begin(HOME)
    state = {CONNECTION_IN_STATE: connection}
    assert admit({"state": state}, "agent")
    assert connection.holder == "agent"
    assert admit({}, "agent")  # not over a connection of ours


async def test_each_rejection_is_reported_with_its_reason() -> None:
    reported: list[str] = []
    connections = Connections(FEW, Metrics().connections_refused, on_refused=reported.append)
    for _ in range(FEW.per_address + 1):
        connections.begin(HOME)
    assert reported == ["address"]


TOTAL, ADDRESS = ConnectionRefusal.TOTAL, ConnectionRefusal.ADDRESS


def test_rejected_connections_are_logged_once_a_minute_for_each_reason_with_the_limits() -> None:
    lines, seconds = LogLines(), Seconds()
    report = refusal_log(make_logger("relay", lines), Bounds.below(256), 256, seconds)
    for reason in (TOTAL, TOTAL, ADDRESS, TOTAL):
        report(reason)
    seconds.now += 61
    report(TOTAL)
    first, other, later = lines.entries("connections refused")
    assert (first["level"], first["reason"]) == ("warning", "total")
    assert (first["connections"], first["open_files"], first["kept_back"]) == (192, 256, 0)
    assert other["reason"] == "address"
    assert (later["reason"], later["kept_back"]) == ("total", 2)
