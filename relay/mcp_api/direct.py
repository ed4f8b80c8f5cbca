"""Answers requests of the new era that have one result, without the SDK's streams.

The SDK prepares every answer to become a stream, which takes such a request twice as long
(docs/decisions/0021, 0030). Must not reject a request: the SDK answers malformed ones.
"""

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, TypeVar

from mcp.shared.inbound import ERROR_CODE_HTTP_STATUS
from starlette.types import Receive, Send

from relay.ascii_json import encoded
from relay.http.http_protocol import HttpAnswer
from relay.mcp_api.fragments import text_of
from relay.mcp_api.methods import MethodError

ResultT = TypeVar("ResultT")

UNWATCHED_S = 0.1
"""How late a disconnect may be noticed. Most calls end earlier, and need no task that waits for one."""

_OK = 200
_JSON = (b"content-type", b"application/json")


async def answer(
    work: Coroutine[Any, Any, dict[str, Any]],
    request_id: str | int,
    receive: Receive,
    send: Send,
) -> None:
    """Send the answer that ``work`` leads to, unless the client has disconnected."""
    answered = await until_disconnected(answer_of(work, request_id), receive)
    if answered is None:
        return
    headers = [_JSON, (b"content-length", b"%d" % len(answered.body))]
    await send({"type": "http.response.start", "status": answered.status, "headers": headers})
    await send({"type": "http.response.body", "body": answered.body})


async def answer_of(work: Coroutine[Any, Any, dict[str, Any]], request_id: str | int) -> HttpAnswer:
    """Return the result of ``work``, or its ``MethodError``, as the answer to the request of that id."""
    status = _OK
    try:
        member = f'"result":{text_of(await work)}'
    except MethodError as error:
        status = ERROR_CODE_HTTP_STATUS.get(error.code, _OK)
        document = {"code": error.code, "message": error.message}
        member = f'"error":{encoded(document if error.data is None else {**document, "data": error.data})}'
    return HttpAnswer(status, f'{{"jsonrpc":"2.0","id":{encoded(request_id)},{member}}}'.encode("ascii"))


async def until_disconnected(work: Coroutine[Any, Any, ResultT], receive: Receive) -> ResultT | None:
    """Return the result of ``work``; None, with ``work`` cancelled, if the client disconnects first."""
    async with _ClientWatch(receive):
        return await work
    return None


class _ClientWatch:
    """The context of one request, which ends when its client disconnects.

    Works as ``asyncio.timeout`` does: by cancelling the task that it is in, and by suppressing that
    cancellation and no other.
    """

    __slots__ = ("_cancelling", "_disconnected", "_receive", "_task", "_timer", "_watching")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._disconnected = False
        self._watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        self._task = asyncio.current_task()
        self._cancelling = self._task.cancelling() if self._task is not None else 0
        self._timer = asyncio.get_running_loop().call_later(UNWATCHED_S, self._begin)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._timer.cancel()
        if self._watching is not None:
            self._watching.cancel()
        if not self._disconnected or self._task is None:
            return False
        return self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError

    def _begin(self) -> None:
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if self._task is not None:
            self._disconnected = True
            self._task.cancel()
