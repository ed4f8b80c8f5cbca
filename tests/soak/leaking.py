"""A process with a status, which leaks what its argument names, a hundred times a second: for a test."""

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from schemas.process.resources import resources
from schemas.process.status_socket import served

_PERIOD_S = 0.01


async def _main(state: Path, what: str) -> None:
    loop = asyncio.get_running_loop()
    kept: list[object] = []
    leaks: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "memory": lambda: os.urandom(1 << 20),
        "descriptors": lambda: os.open(os.devnull, os.O_RDONLY),
        "threads": lambda: threading.Thread(target=threading.Event().wait, daemon=True).start(),
        "tasks": lambda: asyncio.create_task(asyncio.Event().wait()),
    }
    async with served(state, lambda: resources(loop)):
        print("serving", flush=True)
        while True:
            kept.append(leaks[what]())
            await asyncio.sleep(_PERIOD_S)


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1]), sys.argv[2]))
