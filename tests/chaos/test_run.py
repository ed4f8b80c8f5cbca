"""Sixty faults break no promise, and the journals hold what the checker needs to see it."""

from pathlib import Path

import pytest

from tests.chaos.checker import violations
from tests.chaos.history import summary
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
    assert history.healings
    assert history.lags
