"""The edges of a process of the node: its clock, its lock, its signals, and the line with which it ends.

``now_ms`` is for composition roots and commands; everything else takes a clock as an argument. Must not
import the command line's library: the daemon does without it.
"""

import fcntl
import os
import signal
import sys
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from schemas.files import open_state
from schemas.identity_files import IdentityFilesError


def fail(text: str, code: int) -> NoReturn:
    """End with ``code`` and ``text`` on standard error."""
    print(f"kubelet: {text}", file=sys.stderr)  # noqa: T201 - the output of a command
    raise SystemExit(code)


def run_until_signal(work: Coroutine[Any, Any, None]) -> None:
    """Run ``work`` until SIGINT, SIGTERM or the SIGHUP of a closed terminal, which are no failure.

    From the first signal on, and once ``work`` has ended, the process ignores them: another would interrupt
    what is done to end.
    """
    # Here, not above: `kubelet run` only becomes another process, and each board waits for it at each start.
    import asyncio  # noqa: PLC0415

    from schemas.faults import first_of  # noqa: PLC0415 - as above
    from schemas.process.service_manager import call_at, signals_that_stop  # noqa: PLC0415 - as above

    signals = signals_that_stop()
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        task = loop.create_task(work)

        def stop() -> None:
            for number in signals:
                signal.signal(number, signal.SIG_IGN)
            task.cancel()

        async def ended() -> None:
            await asyncio.wait([task])

        for number in signals:
            call_at(number, loop, stop)
        runner.run(ended())
        if not task.cancelled() and (error := task.exception()) is not None:
            raise first_of(error)


def now_ms() -> int:
    """Return the system's wall time in milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


def ticks_ms() -> int:
    """Return milliseconds that only go forward."""
    return time.monotonic_ns() // 1_000_000


@contextmanager
def hold_alone(state_dir: Path) -> Iterator[None]:
    """Hold ``state_dir`` alone; the kernel lets go of it when the process ends, however it ends.

    Two daemons with one identity would end each other's sessions again and again. It does not wait for the
    lock: the other daemon may run for months.

    Raises:
        IdentityFilesError: another process holds it.
        OSError: its lock file cannot be used.
    """
    descriptor = open_state(state_dir / "lock", os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise IdentityFilesError(f"another kubelet runs with {state_dir}: stop it first") from None
        yield
    finally:
        os.close(descriptor)
