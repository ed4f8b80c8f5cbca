"""Runs a program's coroutine until a signal ends it. Must not know what it does."""

import asyncio
import signal
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

_T = TypeVar("_T")


def run_until_stopped(
    work: Coroutine[Any, Any, _T],
    loop_factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
    signals: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
) -> _T | None:
    """Return what ``work`` returns, or None when one of ``signals`` ends it: that is no failure.

    After the first signal the process ignores them: another would interrupt what ``work`` does to end.
    """

    async def supervised() -> _T | None:
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()

        def stop() -> None:
            for number in signals:
                # Not by the loop: it would restore the default when it closes, before the process ends.
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)
            task.cancel()

        for number in signals:
            loop.add_signal_handler(number, stop)
        await asyncio.wait([task])
        return None if task.cancelled() else task.result()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(supervised())
