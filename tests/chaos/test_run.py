"""Some faults break no promise, and the journals hold what the checker needs to see it."""

from pathlib import Path

import pytest

from tests.chaos.checker import violations
from tests.chaos.coverage import shortfalls
from tests.chaos.history import History, summary
from tests.chaos.run import run
from tests.chaos.topology import ONE_RELAY, THREE_RELAYS, Topology

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("ended_handshakes"),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]

SEED = 2
FAULTS = 40
OF_SEVERAL = 20


def held(history: History, faults: int, topology: Topology) -> set[str]:
    """Return the calls that succeeded, once no promise is broken, and what was not recorded is none."""
    found = [*map(str, violations(history)), *shortfalls(history, faults, topology)]
    assert not found, f"seed {SEED}: {summary(history)}: {found}"
    succeeded = {call.trace_id for call in history.calls for answer in call.answers if answer.code == "ok"}
    assert len(succeeded) > faults
    assert len({run.trace_id for run in history.runs} & succeeded) > faults / 2
    assert len(history.decisions) >= len(history.outcomes) >= len(succeeded)
    assert any(call.is_remote and call.trace_id in succeeded for call in history.calls)
    answered = {
        reply.token for request in history.requests for reply in request.replies if reply.code == "ok"
    }
    assert len(answered & {served.token for served in history.served}) > faults / 2
    assert any(len(following.samples) > 2 for following in history.followings)
    assert history.healings
    assert history.lags
    return succeeded


async def test_forty_faults_break_no_promise(tmp_path: Path) -> None:
    held(await run(tmp_path, SEED, FAULTS, print), FAULTS, ONE_RELAY)


async def test_twenty_faults_of_three_relays_break_no_promise(tmp_path: Path) -> None:
    history = await run(tmp_path, SEED, OF_SEVERAL, print, THREE_RELAYS)
    succeeded = held(history, OF_SEVERAL, THREE_RELAYS)
    relays = {relay.program for relay in THREE_RELAYS.relays}
    for relay in relays:
        assert any(call.relay == relay and call.trace_id in succeeded for call in history.calls)
        assert any(decision.relay == relay for decision in history.decisions)
        followed = {one.node_id for one in history.followings if one.relay == relay and one.samples}
        assert len(followed) == len(THREE_RELAYS.nodes)
