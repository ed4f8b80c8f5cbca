"""What lies below something in use is given back to the system."""

import subprocess
import sys

import psutil
import pytest

SCRIPT = """
import asyncio, re
from schemas.process.resources import keep_trimmed

def heap_kib():
    text = open("/proc/self/smaps").read()
    return int(re.search(r"\\[heap\\].*?Private_Dirty: +(\\d+)", text, re.DOTALL)[1])

async def main():
    # Each too large for Python's own allocator, too small for a mapping of its own.
    kept = [bytearray(4096) for _ in range(8192)]
    above = bytearray(4096)
    del kept
    before = heap_kib()
    task = asyncio.create_task(keep_trimmed(0.01))
    async with asyncio.timeout(30):
        while before - heap_kib() < 16384:
            await asyncio.sleep(0.01)
    print("given back", len(above))

asyncio.run(main())
"""


@pytest.mark.integration
@pytest.mark.skipif(not hasattr(psutil, "heap_trim"), reason="psutil before 7.2 cannot trim a heap")
def test_what_is_free_below_what_is_in_use_is_given_back() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "given back 4096\n", done.stderr
