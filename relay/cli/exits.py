"""How the relay's commands end: their exit codes, the form of an error, and what ends one that goes on.

Exit codes: 0 done; 1 the answer is no; 2 the command line is wrong; 3 it cannot run as things are (a file
is missing or exposed, a port is taken), or the relay has failed; 4 something that was there is lost; 70 a
fault of our own in a command; 78 the settings cannot be used, and a restart does not help; 130 a signal has
ended it before it had an answer. Results go to standard output, everything else to standard error. Must not
import what an installation of a node lacks.
"""

import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

if TYPE_CHECKING:
    import asyncio

EXIT_LOST = 4

_T = TypeVar("_T")


def fail(text: str, code: int) -> NoReturn:
    """Print ``text`` as one line of error, and exit with ``code``."""
    print(f"relay: {text}", file=sys.stderr)  # noqa: T201 - the output of a command
    raise SystemExit(code)


def run_until_stopped(
    work: Coroutine[Any, Any, _T],
    loop_factory: "Callable[[], asyncio.AbstractEventLoop] | None" = None,
    signals: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
) -> _T | None:
    """Return what ``work`` returns, or None when one of ``signals`` ends it: that is no failure.

    After the first signal the process ignores them: another would interrupt what ``work`` does to end. They
    are handled where Python allows it, in the main thread.
    """
    import asyncio  # noqa: PLC0415 - most commands do without

    async def supervised() -> _T | None:
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()

        def stop() -> None:
            for number in signals:
                # Not by the loop: it would restore the default when it closes, before the process ends.
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)
            task.cancel()

        for number in signals if threading.current_thread() is threading.main_thread() else ():
            loop.add_signal_handler(number, stop)
        await asyncio.wait([task])
        return None if task.cancelled() else task.result()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(supervised())
