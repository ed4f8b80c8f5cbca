"""A minute of calls, reconnects and restarts of the broker: nothing grows, and no promise is broken."""

from pathlib import Path

import pytest

from tests.chaos.checker import violations
from tests.chaos.history import summary
from tests.soak.__main__ import SEED, table
from tests.soak.run import run
from tests.soak.slopes import CALLS_PER_S, slopes

SECONDS = 60


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_a_minute_of_soak_is_flat(tmp_path: Path) -> None:
    history, samples = await run(tmp_path, SECONDS, SEED, print)
    found = slopes(samples)
    assert all(slope.is_flat for slope in found), "\n".join(table(found))
    assert not (broken := violations(history)), f"{summary(history)}: {broken[:10]}"
    # What does not call does not leak; how many calls a busy machine makes is not judged.
    succeeded = sum(answer.code == "ok" for call in history.calls for answer in call.answers)
    assert succeeded > SECONDS * CALLS_PER_S / 5, summary(history)
