"""Runs a program for a handler, and returns the beginning of what it prints.

For handlers of packages too. Must not use a shell: arguments of a command are the caller's text.
"""

import asyncio
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Sequence
from typing import NamedTuple


class Printed(NamedTuple):
    """What a program has printed on its standard output, and its exit code; None if it was stopped."""

    text: str
    code: int | None


async def printed_by(command: Sequence[str], limit: int = 64 * 1024) -> Printed:
    """Return what ``command`` prints, of which ``limit`` bytes are read; then it is stopped.

    It is stopped too where its caller is cancelled.

    Raises:
        OSError: it cannot be started.
    """
    process = await asyncio.create_subprocess_exec(*command, stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL)
    try:
        data = await _first_bytes(process, limit)
        code = await process.wait() if len(data) < limit else None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return Printed(data.decode("utf-8", "replace"), code)


async def _first_bytes(process: asyncio.subprocess.Process, limit: int) -> bytes:
    if process.stdout is None:
        return b""
    try:
        return await process.stdout.readexactly(limit)
    except asyncio.IncompleteReadError as error:
        return error.partial
