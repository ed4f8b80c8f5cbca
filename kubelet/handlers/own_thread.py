"""A handler of another package, with a thread and an event loop of its own.

Its code may wait without ``await``, never return, or return what no frame can hold. Then its own callers get
an error, each by the deadline, and the daemon goes on. It shares the interpreter with the daemon all the
same: code that keeps the interpreter's lock stops both. Must not judge whether a result fits its document.
"""

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, TypeVar

from kubelet.handlers.base import Handler
from schemas.errors import Failure, ToolError
from schemas.frames import MAX_FRAME_BYTES
from schemas.threads import NoThreadError, started

T = TypeVar("T")

MAX_BEHIND = 64
"""How many commands may wait for a thread that is blocked: those whose deadline has passed wait too."""
_RETRY_MS = 1_000


class HandlerInThread(Handler):
    """Runs ``handler``, whose ``capability`` it announces, in a thread that this starts.

    Raises:
        NoThreadError: the system has no thread left.
    """

    def __init__(self, handler: Handler, capability: Mapping[str, Any]) -> None:
        self._handler = handler
        self._capability = capability
        self._submitted = self._reached = 0
        self._loop = asyncio.new_event_loop()
        # A daemon: code that never returns must not keep the process from ending.
        thread = threading.Thread(target=self._loop.run_forever, name=capability["cap_id"], daemon=True)
        try:
            started(thread)
        except NoThreadError:
            self._loop.close()
            raise

    @property
    def capability(self) -> Mapping[str, Any]:
        """The capability as the manifest contains it."""
        return self._capability

    async def invoke(self, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the handler returns, as plain JSON.

        Raises:
            ToolError: RATE_LIMITED, if its thread does not get to the commands that it has.
            Exception: what the handler raises; ValueError or TypeError: its result is too large or no JSON.
        """
        if self._submitted - self._reached >= MAX_BEHIND:
            raise ToolError(Failure.RATE_LIMITED, "The handler is blocked.", retry_after_ms=_RETRY_MS)
        return await self._in_thread(partial(self._invoke, verb, arguments))

    async def run(self) -> None:
        """Do the handler's work in the background."""
        await self._in_thread(self._handler.run)

    async def _in_thread(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        abandoned = threading.Event()
        future = asyncio.run_coroutine_threadsafe(_contained(work, abandoned), self._loop)
        self._submitted += 1
        self._loop.call_soon_threadsafe(self._reach, self._submitted)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            # What the thread has not begun must not begin: its deadline has passed.
            abandoned.set()
            raise

    def _reach(self, number: int) -> None:
        self._reached = number

    async def _invoke(self, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        result = await self._handler.invoke(verb, arguments)
        if not isinstance(result, dict):
            raise TypeError("the result is no object")
        if _exceeds(result, MAX_FRAME_BYTES):
            raise ValueError(f"the result is larger than {MAX_FRAME_BYTES} bytes")
        # A copy: the handler may keep what it returned, and change it.
        plain: dict[str, Any] = json.loads(json.dumps(result, allow_nan=False))
        return plain


async def _contained(work: Callable[[], Coroutine[Any, Any, T]], abandoned: threading.Event) -> T:
    """Return what ``work`` returns; what would end the thread's event loop is an ordinary error.

    Raises:
        CancelledError: it is abandoned before it begins, or cancelled.
        RuntimeError: it would have ended the program, or cancelled itself.
        Exception: what ``work`` raises.
    """
    if abandoned.is_set():
        raise asyncio.CancelledError
    try:
        return await work()
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise RuntimeError("the handler has cancelled itself") from error
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError("the handler would end the program") from error


def _exceeds(value: object, limit: int) -> bool:
    """Return whether ``value`` takes more than ``limit`` bytes as JSON, without writing it.

    By no more steps than ``limit``: each value takes a byte at least.
    """
    size, pending = 0, [value]
    while pending and size <= limit:
        item = pending.pop()
        size += len(item) if isinstance(item, str | dict | list | tuple) else 1
        if size > limit:
            break
        if isinstance(item, dict):
            pending += (*item.keys(), *item.values())
        elif isinstance(item, list | tuple):
            pending += item
    return size > limit
