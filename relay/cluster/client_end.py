"""How a client of NATS ends: how its loss is noticed, and how it is closed.

The library may swallow a cancellation, so nothing that it does is waited for without a bound. Must not
connect.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError

END_TIMEOUT_S = 1.0
_PROBE_TIMEOUT_S = 2


async def until_lost(client: Client, lost: asyncio.Event, subject: str, interval_s: float) -> str:
    """Return why, when the connection has ended or the server does not answer.

    It is probed by ``subject``, which no relay answers: half open, it would last for minutes.
    """
    while not lost.is_set():
        with suppress(TimeoutError):
            async with asyncio.timeout(interval_s):
                await lost.wait()
            break
        try:
            # Not flush: the answer to one that was given up ends the library's reader.
            await client.request(subject, b"", _PROBE_TIMEOUT_S)
        except NoRespondersError:
            continue
        except (NatsError, TimeoutError):
            return f"the server does not answer within {_PROBE_TIMEOUT_S} s"
    return str(client.last_error or "the server has closed it")


async def ended(tasks: Sequence["asyncio.Future[Any]"]) -> None:
    """Cancel ``tasks``, and wait for their ends, but not for long."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=END_TIMEOUT_S)


async def closed(client: Client) -> None:
    """Close ``client``: a peer that has gone acknowledges nothing, and is not waited for."""
    closing = asyncio.ensure_future(client.close())
    await asyncio.wait({closing}, timeout=END_TIMEOUT_S)
    if not closing.done():
        closing.cancel()
    elif (error := closing.exception()) is not None and not isinstance(error, NatsError | OSError):
        raise error
