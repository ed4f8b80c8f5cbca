"""The edges of a process of the node: its exit codes, its signals, and an error in one line.

Must not import the command line's library: the daemon does without it.
"""

import asyncio
import signal
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from schemas.addresses import AddressError
from schemas.error_roots import EdgeError
from schemas.faults import FailedError

EXIT_NO = 1
EXIT_USAGE = 2
EXIT_CANNOT_RUN = 3


def fail(text: str, code: int) -> NoReturn:
    """End with ``code`` and one line on standard error."""
    print(f"kubelet: {text}", file=sys.stderr)  # noqa: T201 - the output of a command
    raise SystemExit(code)


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """End with one line and the right code when something goes wrong that an operator can correct."""
    try:
        yield
    except AddressError as error:
        fail(str(error), EXIT_USAGE)
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), EXIT_CANNOT_RUN)
    except (EdgeError, FailedError, ValueError) as error:
        fail(str(error), EXIT_CANNOT_RUN)


def run_until_signal(work: Coroutine[Any, Any, None]) -> None:
    """Run ``work`` until SIGINT or SIGTERM, which are no failure."""

    async def supervised() -> None:
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()) is not None:
            raise _first(error)

    asyncio.run(supervised())


def _first(error: BaseException) -> BaseException:
    """Return what went wrong first in the task groups that ``error`` came through."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
