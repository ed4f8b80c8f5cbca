"""Requests of the new era that have one result, from the body to the response.

The SDK's way is made for answers that can become a stream; along it such a request takes twice as long
(docs/decisions/0021, 0030). Must not refuse a request: what is malformed is the SDK's to answer.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from mcp.shared.inbound import ERROR_CODE_HTTP_STATUS
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from relay.ascii_json import encoded
from relay.mcp_api.fragments import text_of
from relay.mcp_api.methods import MethodError

ResultT = TypeVar("ResultT")

_OK = 200


async def answer(
    work: Coroutine[Any, Any, dict[str, Any]],
    request_id: str | int,
    scope: Scope,
    receive: Receive,
    send: Send,
) -> None:
    """Send the result of ``work``, or the ``MethodError`` that it raises, unless the client has gone."""
    status = _OK
    try:
        result = await until_gone(work, receive)
    except MethodError as error:
        status = ERROR_CODE_HTTP_STATUS.get(error.code, _OK)
        told = {"code": error.code, "message": error.message}
        member = f'"error":{encoded(told if error.data is None else {**told, "data": error.data})}'
    else:
        if result is None:
            return
        member = f'"result":{text_of(result)}'
    body = f'{{"jsonrpc":"2.0","id":{encoded(request_id)},{member}}}'
    await Response(body, status, media_type="application/json")(scope, receive, send)


async def until_gone(work: Coroutine[Any, Any, ResultT], receive: Receive) -> ResultT | None:
    """Return what ``work`` comes to; None, with ``work`` cancelled, if the client goes away first."""
    working, gone = asyncio.create_task(work), asyncio.create_task(_gone(receive))
    gone.add_done_callback(lambda _: working.cancel())
    try:
        return await working
    except asyncio.CancelledError:
        this = asyncio.current_task()
        if gone.done() and not (this and this.cancelling()):
            return None
        raise  # cancelled from outside, not by the client's going
    finally:
        gone.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
