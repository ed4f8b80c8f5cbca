"""The calls in flight: revoking the token that one was made with ends it.

Must not know tools or answers.
"""

import asyncio
from collections.abc import Collection
from contextlib import suppress
from types import TracebackType

from schemas.errors import Failure, ToolError

_ENDING_S = 1.0
_REVOKED = (Failure.TOKEN_REFUSED, "The token was revoked during the call.")
_STOPPED = (Failure.DEADLINE_EXCEEDED, "The relay was stopped during the call, which may have run.")


class InFlight:
    """Every call in flight."""

    def __init__(self) -> None:
        self._calls: set[RevocableCall] = set()
        self._revoked: frozenset[str] = frozenset()
        self._none_left = asyncio.Event()
        self._none_left.set()

    def under(self, jti: str) -> "RevocableCall":
        """Return the context of one call that was made with the token ``jti``.

        If the token is revoked meanwhile, it raises TOKEN_REFUSED in place of any result.
        """
        return RevocableCall(jti, self)

    def revoke(self, jtis: Collection[str]) -> None:
        """End every call that was made with one of ``jtis``, which are all revoked tokens."""
        self._revoked = frozenset(jtis)
        for call in self._calls:
            if call.jti in self._revoked:
                call.end(_REVOKED)

    async def drain(self, timeout_s: float) -> None:
        """Wait until no call is in flight; end those that last longer than ``timeout_s``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._none_left.wait()
        for call in self._calls:
            call.end(_STOPPED)
        with suppress(TimeoutError):
            async with asyncio.timeout(_ENDING_S):
                await self._none_left.wait()

    def enter(self, call: "RevocableCall") -> None:
        """Add ``call``, which begins.

        Raises:
            ToolError: TOKEN_REFUSED, if its token was revoked since the call was allowed.
        """
        if call.jti in self._revoked:
            raise ToolError(Failure.TOKEN_REFUSED, "The token was revoked.")
        self._calls.add(call)
        self._none_left.clear()

    def leave(self, call: "RevocableCall") -> None:
        """Remove ``call``, which has ended."""
        self._calls.discard(call)
        if not self._calls:
            self._none_left.set()


class RevocableCall:
    """The context of one call. Works as ``asyncio.timeout`` does: by cancelling the task that it is in."""

    def __init__(self, jti: str, calls: InFlight) -> None:
        self.jti = jti
        self._calls = calls
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0
        self._reason: tuple[Failure, str] | None = None

    def is_stopped(self) -> bool:
        """Return whether it is ended here, and not by its caller."""
        return self._reason is not None

    def end(self, reason: tuple[Failure, str]) -> None:
        """End the call with ``reason`` in place of any result."""
        if self._task is not None and self._reason is None:
            self._reason = reason
            self._task.cancel()

    async def __aenter__(self) -> None:
        self._task = asyncio.current_task()
        self._cancelling = self._task.cancelling() if self._task is not None else 0
        self._calls.enter(self)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._calls.leave(self)
        if self._reason is None or self._task is None:
            return
        if kind is None or not issubclass(kind, asyncio.CancelledError):
            # It ended at the same time: the cancellation is still pending, and must not hit other code.
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
        if self._task.uncancel() > self._cancelling:
            raise asyncio.CancelledError from error  # its caller has cancelled it too
        raise ToolError(*self._reason) from None
