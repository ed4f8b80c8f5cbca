"""Sixty faults break no promise, and the journals hold what the checker needs to see it."""

from pathlib import Path

import pytest

from tests.chaos.checker import violations
from tests.chaos.history import AGENT_LINK, summary
from tests.chaos.run import run

SEED = 2
FAULTS = 60


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.processes
async def test_sixty_faults_break_no_promise(tmp_path: Path) -> None:
    history = await run(tmp_path, SEED, FAULTS, print)
    found = violations(history)
    assert not found, f"seed {SEED}: {summary(history)}: {[str(violation) for violation in found]}"
    # What was not recorded cannot be violated.
    succeeded = {call.trace_id for call in history.calls for answer in call.answers if answer.code == "ok"}
    assert len(succeeded) > FAULTS
    assert len({run.trace_id for run in history.runs} & succeeded) > FAULTS
    assert len(history.decisions) >= len(history.outcomes) >= len(succeeded)
    assert any(call.link != AGENT_LINK and call.trace_id in succeeded for call in history.calls)
    assert any(len(following.samples) > 2 for following in history.followings)
    answered = {
        reply.token for request in history.requests for reply in request.replies if reply.code == "ok"
    }
    assert len(answered & {served.token for served in history.served}) > FAULTS / 2
    assert history.healings
    assert history.lags
