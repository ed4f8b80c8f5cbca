"""Calls of the new era, from the request to the door and back.

A call is one request and one answer, and its time is up long before an answer would have to become a stream.
The SDK's way is made for those that do; along it a call takes twice as long (docs/decisions/0021). Must not
refuse anything: what is not plainly such a call is the SDK's to answer.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from relay.ascii_json import encoded
from relay.http.body_parser import MESSAGE_IN_SCOPE

ResultT = TypeVar("ResultT")


async def answer(
    result: Coroutine[Any, Any, dict[str, Any]], scope: Scope, receive: Receive, send: Send
) -> None:
    """Answer the request with what ``result`` comes to, if there is still somebody to answer."""
    told = await until_gone(result, receive)
    if told is not None:
        message = {"jsonrpc": "2.0", "id": scope[MESSAGE_IN_SCOPE]["id"], "result": told}
        await Response(encoded(message), media_type="application/json")(scope, receive, send)


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
        raise  # somebody else has ended it
    finally:
        gone.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
