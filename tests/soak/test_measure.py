"""What a real process leaks is measured and found."""

import asyncio
import sys
from pathlib import Path

import pytest

from tests.soak.measure import Watched, keep_sampling
from tests.soak.slopes import LIMITS, Sample, slopes

BOUND_S = 60
ENOUGH = 40


async def sampled(state: Path, what: str) -> list[Sample]:
    """Return samples of a process that leaks ``what``."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "tests.soak.leaking", str(state), what),
        stdout=asyncio.subprocess.PIPE,
    )
    samples: list[Sample] = []
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"serving\n"
        sampling = asyncio.create_task(keep_sampling({what: Watched(process.pid, state)}, 0.05, samples))
        while len(samples) < ENOUGH:
            await asyncio.sleep(0.05)
            assert not sampling.done()
        sampling.cancel()
        await asyncio.wait({sampling})
    finally:
        process.kill()
        await process.wait()
    return samples


@pytest.mark.parametrize("what", [*LIMITS, "nothing"])
async def test_what_a_process_leaks_is_found(tmp_path: Path, what: str) -> None:
    async with asyncio.timeout(BOUND_S):
        samples = await sampled(tmp_path, what)
    assert [slope.what for slope in slopes(samples) if not slope.is_flat] == [what] * (what in LIMITS)
