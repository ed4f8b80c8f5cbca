from typing import Any

import pytest

from relay.http.websocket_protocol import FLOODED
from relay.sessions.peer_faults import PeerFaults
from schemas.session import DropReason, PeerProtocolError
from tests.fakes.hub import Hub
from tests.fakes.signer import NODE_ID


@pytest.fixture
def faults(hub: Hub) -> PeerFaults:
    return PeerFaults(hub.metrics, hub.refusals, hub.log)


def refusals(hub: Hub) -> list[tuple[str, str, int]]:
    hub.refusals.write()
    return [(line["event"], line["reason"], line["count"]) for line in hub.audited()]


def test_a_broken_protocol_is_counted_audited_and_logged_without_raw_text(
    hub: Hub, faults: PeerFaults
) -> None:
    faults.broken(NODE_ID, PeerProtocolError("a\x1b[31m frame"))
    assert hub.counted("sessions_total", event="protocol_violation") == 1
    assert refusals(hub) == [("session_broken", "protocol", 1)]
    (line,) = hub.lines.entries("node broke the protocol")
    assert line["reason"] == "a\\x1b[31m frame"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (1009, [("session_broken", "frame_too_large", 1)]),
        (FLOODED, [("session_broken", "flooded", 1)]),
        (1000, []),
    ],
)
def test_what_the_server_closed_by_itself_is_audited(
    hub: Hub, faults: PeerFaults, code: int, expected: list[tuple[str, str, int]]
) -> None:
    faults.closed_by_server(NODE_ID, code)
    assert refusals(hub) == expected
    assert bool(hub.lines.entries("node sent more frames than its rate")) == (code == FLOODED)


def test_dropped_frames_are_counted_by_reason(hub: Hub, faults: PeerFaults) -> None:
    class Dropping:
        def take_dropped(self) -> dict[DropReason, int]:
            return {DropReason.OVER_RATE: 3, DropReason.UNASKED: 1}

    connection: Any = Dropping()
    faults.dropped(NODE_ID, connection)
    assert hub.counted("frames_dropped_total", reason="over_rate") == 3
    assert {event for event, _, _ in refusals(hub)} == {"frame_dropped"}
    assert {line["reason"] for line in hub.lines.entries("frame dropped")} == {"over_rate", "unasked"}
