"""How a relay authenticates a connecting node, and counts what nodes do wrong."""

from typing import Any

import pytest

from relay.http.websocket_protocol import FLOODED
from relay.sessions.handshake import Handshake, HandshakeError, PeerFaults
from schemas.error_roots import PeerError
from schemas.frames import Frame, FrameReader
from schemas.session import CloseCode, DropReason
from tests.fakes.environment import PUBLIC_URL
from tests.fakes.frames import frame_text
from tests.fakes.hub import Hub
from tests.fakes.node_end import device_token
from tests.fakes.signer import NODE_ID, NOW_MS, OTHER_NODE_ID, SimulatedNode, key_named

NOW_S = NOW_MS // 1000
THIEF = key_named("a thief")


@pytest.fixture
def node(hub: Hub) -> SimulatedNode:
    return hub.ca.issue()


@pytest.fixture
def handshake(hub: Hub) -> Handshake:
    hub.sessions()
    return hub.handshake


def auth(reader: FrameReader, node: SimulatedNode, token: str, **members: Any) -> Frame:
    payload = {"node_id": node.node_id, "certificate": node.leaf_pem, "token": token, **members}
    return reader.read(frame_text("auth", 2, answers=1, **payload), 8192)


def refusal(handshake: Handshake, frame: Frame, nonce: object) -> tuple[str, CloseCode]:
    with pytest.raises(HandshakeError) as caught:
        handshake.judge(frame, nonce, NOW_MS)
    return caught.value.reason, caught.value.code


def test_a_rejected_node_is_the_other_ends_fault() -> None:
    assert HandshakeError.__bases__ == (PeerError,)


def test_a_challenge_fits_its_document_and_is_fresh(handshake: Handshake, reader: FrameReader) -> None:
    first: dict[str, Any] = {**handshake.challenge(NOW_MS)}
    second = handshake.challenge(NOW_MS)
    assert reader.read(frame_text("challenge", **first), 8192).payload == first
    assert first["audience"] == PUBLIC_URL
    assert first["server_time_ms"] == NOW_MS
    assert first["nonce"] != second["nonce"]


def test_the_root_may_follow_the_leaf(handshake: Handshake, reader: FrameReader, node: SimulatedNode) -> None:
    challenge = handshake.challenge(NOW_MS)
    chain = node.leaf_pem + node.root_pem
    frame = auth(reader, node, device_token(node, challenge), certificate=chain)
    assert handshake.judge(frame, challenge["nonce"], NOW_MS).kid == node.kid


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        pytest.param({"aud": "https://other.example"}, "token_audience", id="another relay's audience"),
        pytest.param({"aud": f"{PUBLIC_URL}/mcp"}, "token_audience", id="the audience of agents"),
        pytest.param({"nonce": "x" * 43}, "token_nonce", id="another challenge's nonce"),
        pytest.param({"iat": NOW_S - 60, "exp": NOW_S - 30}, "token_expired", id="expired"),
        pytest.param({"iat": NOW_S + 30, "exp": NOW_S + 60}, "token_not_yet", id="from the future"),
        pytest.param({"exp": NOW_S + 61}, "token_life", id="longer than a minute"),
        pytest.param({"iss": OTHER_NODE_ID}, "token_subject", id="another issuer"),
        pytest.param({"sub": OTHER_NODE_ID}, "token_subject", id="another subject"),
        pytest.param(
            {"iss": OTHER_NODE_ID, "sub": OTHER_NODE_ID}, "token_subject", id="another node altogether"
        ),
        pytest.param({"token_class": "agent_runtime"}, "token_claims", id="an agent's class"),
        pytest.param({"scope": "tools:call:read_only"}, "token_claims", id="an agent's scope"),
        pytest.param({"tenant": "acme"}, "token_claims", id="one claim more"),
        pytest.param({"key": THIEF}, "token_signature", id="another key"),
        pytest.param({"key": THIEF, "kid": "ab" * 32}, "token_unknown_key", id="a key of its own"),
    ],
)
def test_a_token_that_does_not_answer_this_challenge_is_refused(
    handshake: Handshake,
    reader: FrameReader,
    node: SimulatedNode,
    claims: dict[str, Any],
    reason: str,
) -> None:
    challenge = handshake.challenge(NOW_MS)
    frame = auth(reader, node, device_token(node, challenge, **claims))
    assert refusal(handshake, frame, challenge["nonce"]) == (reason, CloseCode.AUTH_FAILED)


def test_the_answer_to_one_challenge_does_not_answer_the_next(
    handshake: Handshake, reader: FrameReader, node: SimulatedNode
) -> None:
    seen = auth(reader, node, device_token(node, handshake.challenge(NOW_MS)))
    nonce = handshake.challenge(NOW_MS)["nonce"]
    assert refusal(handshake, seen, nonce) == ("token_nonce", CloseCode.AUTH_FAILED)


def test_who_only_has_the_public_leaf_gets_no_further(
    handshake: Handshake, reader: FrameReader, node: SimulatedNode, hub: Hub
) -> None:
    wire = hub.connect(node)
    challenge = handshake.challenge(NOW_MS)
    frame = auth(reader, node, device_token(node, challenge, key=THIEF))
    assert refusal(handshake, frame, challenge["nonce"])[0] == "token_signature"
    (known,) = hub.nodes_of(node.tenant)
    assert known.manifest is not None
    assert known.manifest.wire == wire


@pytest.fixture
def faults(hub: Hub) -> PeerFaults:
    return PeerFaults(hub.metrics, hub.refusals, hub.log)


def refusals(hub: Hub) -> list[tuple[str, str, int]]:
    hub.refusals.write()
    return [(line["event"], line["reason"], line["count"]) for line in hub.audited()]


def test_a_broken_protocol_is_counted_audited_and_logged_without_raw_text(
    hub: Hub, faults: PeerFaults
) -> None:
    faults.broken(NODE_ID, "a\x1b[31m frame")
    assert hub.counted("sessions_total", event="protocol_violation") == 1
    assert refusals(hub) == [("session_broken", "protocol", 1)]
    (line,) = hub.lines.entries("node broke the protocol")
    assert line["reason"] == "a\\x1b[31m frame"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (1002, [("session_broken", "protocol", 1)]),
        (1007, [("session_broken", "protocol", 1)]),
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
            return {DropReason.OVER_RATE: 3, DropReason.UNSOLICITED: 1}

    connection: Any = Dropping()
    faults.dropped(NODE_ID, connection)
    assert hub.counted("frames_dropped_total", reason="over_rate") == 3
    assert {event for event, _, _ in refusals(hub)} == {"frame_dropped"}
    assert {line["reason"] for line in hub.lines.entries("frame dropped")} == {"over_rate", "unasked"}
