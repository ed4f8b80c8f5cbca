"""The requests of local clients for lent tools, from the socket to the answer that the relay brings.

A request is sent once, and again with the same id when the connection to the relay resumes; it ends once: by
its answer, its timeout, its session's end, or its client's. Must not know the socket.
"""

import asyncio
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kubelet.caller_tools.sessions import Session
from schemas.caller_tools import (
    MAX_PENDING,
    MAX_VALUE_BYTES,
    NODE_MARGIN_S,
    CallerToolError,
    size_of,
)
from schemas.errors import Failure, ToolError
from schemas.frames import OneWayType
from schemas.pacing import TokenBucket
from schemas.payloads import CallerToolCancel, CallerToolRequest, CallerToolResult
from schemas.websocket_frames import FrameBudget, FrameHead, cost_of

MAX_QUEUED = 256
"""The requests of one session that wait until fewer than ``MAX_PENDING`` are pending."""
MAX_HELD_BYTES = 16 << 20
"""The arguments of all requests together, which are kept to be sent again."""
_UUID_BYTES = 16
_BUSY_RETRY_MS = 1000
_SEND_RETRY_S = 0.05
"""When to try again what the connection did not take: over its rate, or lost and not noticed yet."""
_FRAMES_PER_S, _FRAMES_AT_ONCE = 6.0, 50.0
"""Of the 20 frames a second, 120 at once, that the relay reads: it disconnects a node that stays behind."""
_FRAMES_OF_AN_ANSWER, _MOST_CREDIT = 16.0, 100.0
"""What it reads besides, because of an answer, and of a session: more, but other frames take of that too."""
_BYTES_LIKE_A_FRAME = 4096
_ENVELOPE_BYTES = 512
"""More than a frame has around the arguments."""

Send = Callable[[OneWayType, Mapping[str, Any]], bool]
"""Sends a frame to the relay; returns whether the connection took it. Must not block."""


class CallerFailedError(ToolError):
    """The caller's own tool failed. ``text`` is the caller's, and not to be trusted."""

    def __init__(self, text: str) -> None:
        super().__init__(Failure.CALLER_TOOL_FAILED)
        self.text = text


@dataclass(slots=True, eq=False)
class _Pending:
    """One request.

    Attributes:
        due: whether it is to be sent, for the first time or again.
        sent: whether it was, at least once.
    """

    payload: CallerToolRequest
    size: int
    answer: "asyncio.Future[Any]"
    due: bool = True
    sent: bool = False


@dataclass(slots=True)
class _SessionQueue:
    """The requests of one session: those that the relay has, those that wait, and what is to be cancelled."""

    pending: dict[str, _Pending] = field(default_factory=dict)
    queued: deque[_Pending] = field(default_factory=deque)
    cancelled: deque[CallerToolCancel] = field(default_factory=lambda: deque(maxlen=MAX_PENDING))

    def all(self) -> list[_Pending]:
        return [*self.pending.values(), *self.queued]


class CallerRequests:
    """All requests of this node."""

    def __init__(
        self, send: Send, random_bytes: Callable[[int], bytes], margin_s: float = NODE_MARGIN_S
    ) -> None:
        self._send = send
        self._random_bytes = random_bytes
        self._margin_s = margin_s
        self._queues: dict[str, _SessionQueue] = {}
        self._held_bytes = 0
        self._budget = _budget()
        self._is_unreachable = False
        self._retry: asyncio.TimerHandle | None = None

    @property
    def in_flight(self) -> int:
        return sum(len(queue.all()) for queue in self._queues.values())

    async def request(self, session: Session, tool: str, arguments: Mapping[str, Any]) -> Any:
        """Return the result of the ``tool`` that ``session`` lends.

        Raises:
            ToolError: it is not lent, cannot be requested now, or the request ended without a result.
        """
        if tool not in session.tools:
            raise ToolError(Failure.CALLER_TOOL_UNKNOWN)
        request = self._admitted(session, tool, arguments)
        queue = self._queues.setdefault(session.session_id, _SessionQueue())
        queue.queued.append(request)
        self._held_bytes += request.size
        try:
            self._fill(queue)
            async with asyncio.timeout(session.timeout_s + self._margin_s):
                return await request.answer
        except TimeoutError:
            raise ToolError(Failure.CALLER_TIMEOUT) from None
        finally:
            self._held_bytes -= request.size
            self._remove(session.session_id, queue, request)

    def answer(self, answer: CallerToolResult) -> bool:
        """End the request that ``answer`` is for; return whether there is one."""
        self._budget.expect(_FRAMES_OF_AN_ANSWER)
        queue = self._queues.get(answer["session_id"])
        request = None if queue is None else queue.pending.get(answer["request_id"])
        if request is None or request.answer.done():
            return False
        if (error := answer.get("error")) is not None:
            request.answer.set_exception(_error_of(CallerToolError(error["code"]), error["message"]))
        else:
            request.answer.set_result(answer["result"])
        return True

    def expect_requests(self) -> None:
        """Let more be requested: the relay has named a session."""
        self._budget.expect(_MOST_CREDIT)

    def end_session(self, session_id: str) -> None:
        if (queue := self._queues.get(session_id)) is not None:
            queue.cancelled.clear()
            for request in queue.all():
                _fail(request)

    def resend(self, session_id: str) -> None:
        """Send the pending requests of a session again: the connection is new, and the relay has named it."""
        if (queue := self._queues.get(session_id)) is not None:
            for request in queue.pending.values():
                request.due = True
            self._flush(queue)

    def unreachable(self) -> None:
        """End the requests that were never sent, and refuse new ones: the relay is not reached."""
        self._is_unreachable = True
        for queue in self._queues.values():
            for request in queue.all():
                if not request.sent:
                    _fail(request)

    def reachable(self) -> None:
        """Accept requests: there is a connection, whose frames the relay counts anew."""
        self._is_unreachable = False
        self._budget = _budget()

    def _admitted(self, session: Session, tool: str, arguments: Mapping[str, Any]) -> _Pending:
        if self._is_unreachable:
            raise ToolError(Failure.CALLER_DISCONNECTED, "The relay is not reached, and so no caller.")
        size = size_of(arguments)
        if size > MAX_VALUE_BYTES:
            raise ToolError(Failure.ARGUMENTS_INVALID, "The arguments are larger than 192 KiB.")
        queue = self._queues.get(session.session_id)
        is_full = queue is not None and len(queue.queued) >= MAX_QUEUED
        if is_full or self._held_bytes + size > MAX_HELD_BYTES:
            raise ToolError(Failure.RATE_LIMITED, retry_after_ms=_BUSY_RETRY_MS)
        payload: CallerToolRequest = {
            "session_id": session.session_id,
            "request_id": str(uuid.UUID(bytes=self._random_bytes(_UUID_BYTES), version=4)),
            "tool": tool,
            "arguments": arguments,
        }
        return _Pending(payload, size, asyncio.get_running_loop().create_future())

    def _fill(self, queue: _SessionQueue) -> None:
        """Make pending what waits, as far as the relay may have more, and send it."""
        while queue.queued and len(queue.pending) < MAX_PENDING:
            request = queue.queued.popleft()
            queue.pending[request.payload["request_id"]] = request
        self._flush(queue)

    def _flush(self, queue: _SessionQueue) -> None:
        """Send what is due; try again soon if the connection does not take it."""
        # Cancellations first: the relay may have too many pending without them.
        while queue.cancelled:
            if not self._sent(OneWayType.CALLER_TOOL_CANCEL, queue.cancelled[0], 0):
                self._retry_soon()
                return
            queue.cancelled.popleft()
        for request in queue.pending.values():
            if not request.due or request.answer.done():
                continue
            if not self._sent(OneWayType.CALLER_TOOL, request.payload, request.size):
                self._retry_soon()
                return
            request.due, request.sent = False, True

    def _sent(self, type_: OneWayType, payload: Mapping[str, Any], size: int) -> bool:
        """Send a frame with arguments of ``size``; return False if the relay would not read it in time."""
        head = FrameHead(is_control=False, is_text=True, payload_bytes=size + _ENVELOPE_BYTES, head_bytes=0)
        if self._budget.take(head, asyncio.get_running_loop().time()) > 0:
            return False
        if not (is_sent := self._send(type_, payload)):
            self._budget.expect(cost_of(head, _BYTES_LIKE_A_FRAME))
        return is_sent

    def _retry_soon(self) -> None:
        if self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(_SEND_RETRY_S, self._flush_all)

    def _flush_all(self) -> None:
        self._retry = None
        for session_id, queue in list(self._queues.items()):
            try:
                self._flush(queue)
            except Exception as error:  # noqa: BLE001 - a bug with one session must not hold up the others
                context = {"message": "requests not sent", "exception": error}
                asyncio.get_running_loop().call_exception_handler(context)
                for request in queue.all():
                    _fail(request)
            self._drop_if_empty(session_id, queue)

    def _remove(self, session_id: str, queue: _SessionQueue, request: _Pending) -> None:
        request_id = request.payload["request_id"]
        is_answered = request.answer.done() and not request.answer.cancelled()
        if queue.pending.pop(request_id, None) is None:
            queue.queued.remove(request)
        elif request.sent and not is_answered:
            queue.cancelled.append({"session_id": session_id, "request_id": request_id})
        self._fill(queue)
        self._drop_if_empty(session_id, queue)

    def _drop_if_empty(self, session_id: str, queue: _SessionQueue) -> None:
        if not (queue.pending or queue.queued or queue.cancelled):
            self._queues.pop(session_id, None)


def _budget() -> FrameBudget:
    bucket = TokenBucket(_FRAMES_PER_S, _FRAMES_AT_ONCE, 0.0)
    return FrameBudget(bucket, bytes_like_a_frame=_BYTES_LIKE_A_FRAME, most_credit=_MOST_CREDIT)


def _fail(request: _Pending) -> None:
    if not request.answer.done():
        request.answer.set_exception(ToolError(Failure.CALLER_DISCONNECTED))


def _error_of(code: CallerToolError, text: str) -> ToolError:
    if code is CallerToolError.TOOL_FAILED:
        return CallerFailedError(text)
    retry_after_ms = _BUSY_RETRY_MS if code is CallerToolError.OVER_CAPACITY else None
    return ToolError(code.failure, retry_after_ms=retry_after_ms)
