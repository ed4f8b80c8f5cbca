"""What a caller is told of a node that is not connected."""

import pytest

from relay.calls.offline import explained
from relay.fleet.node_record import Where
from relay.routing.port import Command, CommandAnswer, LocalRouter
from schemas.errors import Failure, ToolError
from schemas.registry import SchemaRegistry
from tests.fakes.callers import call_of
from tests.fakes.hub import Hub
from tests.fakes.signer import NODE_ID, NOW_MS

ECHO_NAME = f"sysecho.{NODE_ID}.echo.invoke"
PING = {"message": "ping"}
OFFLINE = ToolError(Failure.NODE_OFFLINE)


@pytest.mark.parametrize(
    ("away_ms", "retry_ms"), [(0, 1_000), (400, 1_000), (12_000, 12_000), (3_600_000, 30_000), (-5, 1_000)]
)
def test_it_says_since_when_and_after_what_to_retry(
    registry: SchemaRegistry, away_ms: int, retry_ms: int
) -> None:
    envelope = explained(OFFLINE, NOW_MS, NOW_MS + away_ms).envelope()
    registry.load("error@1.0.0").check(envelope)
    assert envelope["code"] == "E_NODE_OFFLINE"
    assert "2025-10-09 08:53:20 UTC" in envelope["message"]
    assert envelope["retry_after_ms"] == retry_ms


def test_a_node_that_never_connected_has_no_time() -> None:
    envelope = explained(OFFLINE, None, NOW_MS).envelope()
    assert "since this relay was started" in envelope["message"]
    assert envelope["retry_after_ms"] == 30_000


async def test_a_call_to_a_node_that_left_says_when_it_left(hub: Hub) -> None:
    node = hub.ca.issue()
    hub.connect(node)
    hub.fleet.connection_changed(NODE_ID, Where.NOWHERE)
    gateway = hub.gateway(OfflineRouter())
    answer = await gateway.call(call_of(hub.token(), ECHO_NAME, PING))
    assert answer.error is not None
    assert "is not connected since 20" in answer.error["message"]
    assert "retry_after_ms" in answer.error


class OfflineRouter(LocalRouter):
    def start(self, command: Command) -> CommandAnswer:  # noqa: ARG002 - whatever it is
        raise OFFLINE
