"""Checks a value against a server's schema within a deadline, whatever the server has made of both.

A check holds the interpreter's lock, so that a thread which runs it cannot be ended. So one that may take
long runs in a process of its own, which is kept for the next, and killed at the deadline. Must not judge by
itself: ``tool_schemas`` does, here and there.
"""

import asyncio
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process

from relay.client.remote_tools import tool_schemas
from relay.client.remote_tools.errors import Reason, ToolProviderFailure, ToolTimeout
from relay.client.remote_tools.tool_schemas import ValueCheck

_LONGEST_ANSWER = 64 * 1024
_MARGIN_S = 5.0
"""How much longer than this process the other waits, to end by itself if this one is gone."""


class CheckProcess:
    """The checks of one client. The process is started by the first that needs it."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._lock = asyncio.Lock()

    async def fault(
        self, check: ValueCheck, value: object, deadline_at: float, *, is_arguments: bool = False
    ) -> str | None:
        """Return ``check.fault(value)``, or ``check.argument_fault(value)`` of the arguments of a call.

        ``deadline_at`` is a time of the event loop.

        Raises:
            ToolTimeout: it was not found by then.
            ToolProviderFailure: the process cannot be started, or has ended by itself.
        """
        try:
            shown = json.dumps(value)
        except (ValueError, RecursionError):
            return "it is not JSON that can be checked"
        if check.is_quick(value, len(shown)):
            return check.argument_fault(value) if is_arguments else check.fault(value)
        try:
            async with asyncio.timeout_at(deadline_at), self._lock:
                request = {
                    "schema": json.dumps(check.schema),
                    "value": value,
                    "is_arguments": is_arguments,
                    "seconds": deadline_at - asyncio.get_running_loop().time() + _MARGIN_S,
                }
                found: str | None = json.loads(await self._answer(json.dumps(request).encode() + b"\n"))
        except TimeoutError:
            raise ToolTimeout(
                "The check against the schema of the tool did not end within the deadline.",
                reason=Reason.DEADLINE,
                suggested_fix="Report the schema to the operator of the server, or allow more time.",
                may_have_run=not is_arguments,
            ) from None
        except (OSError, asyncio.IncompleteReadError) as error:
            raise ToolProviderFailure(
                "The process that checks a value against the schema of the tool did not run or has ended.",
                reason=Reason.CONTRACT,
                suggested_fix="Permit this program to start its own Python interpreter, with enough memory.",
                may_have_run=not is_arguments,
            ) from error
        return found

    async def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def _answer(self, request: bytes) -> bytes:
        try:
            if self._process is None or self._process.returncode is not None:
                self._process = await _started()
            process = self._process
            assert process.stdin is not None and process.stdout is not None  # noqa: S101, PT018 - both are pipes
            process.stdin.write(request)
            await process.stdin.drain()
            return await process.stdout.readuntil(b"\n")
        except BaseException:
            # Whatever it still computes is of no use.
            await self.close()
            raise


async def _started() -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        tool_schemas.__file__,
        stdin=PIPE,
        stdout=PIPE,
        stderr=DEVNULL,
        limit=_LONGEST_ANSWER,
        # No other variable: it needs no credential.
        env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
