import pytest

from kubelet.session.link import CallFlow
from tests.fakes.seconds import Seconds

HEARTBEAT_S = 60.0


@pytest.fixture
def seconds() -> Seconds:
    return Seconds()


@pytest.fixture
def flow(seconds: Seconds) -> CallFlow:
    return CallFlow(lambda: HEARTBEAT_S, seconds)


def flows(flow: CallFlow) -> bool:
    return flow.is_answered and flow.is_fresh


def test_without_a_session_nothing_flows(flow: CallFlow) -> None:
    assert (flows(flow), flow.state) == (False, "no session")


def test_calls_flow_once_a_command_of_this_session_was_answered(flow: CallFlow) -> None:
    flow.connected(gets_echo=True)
    assert (flows(flow), flow.state) == (False, "no command answered yet")
    flow.answered()
    assert (flows(flow), flow.state) == (True, "calls flow")
    flow.lost()
    assert (flows(flow), flow.state) == (False, "no session")
    flow.connected(gets_echo=True)
    assert not flows(flow)


def test_a_relay_that_sends_no_echo_is_believed_by_its_acknowledgements(flow: CallFlow) -> None:
    flow.connected(gets_echo=False)
    assert flows(flow)


def test_calls_no_longer_flow_when_heartbeats_are_not_acknowledged(flow: CallFlow, seconds: Seconds) -> None:
    flow.connected(gets_echo=True)
    flow.answered()
    seconds.now += 2.2 * HEARTBEAT_S  # one was lost, and both had all of their jitter
    assert flows(flow)
    seconds.now += 0.5 * HEARTBEAT_S
    assert (flows(flow), flow.state) == (False, "the relay acknowledges no heartbeats")
    flow.acknowledged(None)
    assert (flows(flow), flow.state) == (True, "calls flow")


def test_what_the_relay_saw_is_that_of_the_last_acknowledgement_of_this_session(flow: CallFlow) -> None:
    seen = []
    for etag in ("ab" * 32, None, "cd" * 32):
        flow.connected(gets_echo=True)
        seen.append(flow.relay_saw)
        flow.acknowledged(etag)
        seen.append(flow.relay_saw)
    assert seen == [None, "ab" * 32, None, None, None, "cd" * 32]
