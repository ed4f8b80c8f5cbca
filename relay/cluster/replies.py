"""Requests over one connection, and the answers to them.

All answers come to one subscription, each on a subject of its own. The library's own requests take half as
much time again: for random names, a second future, and two more turns of the event loop. Must not know what
is asked.
"""

import asyncio
from itertools import count

from nats.aio.client import Client
from nats.aio.msg import Msg
from structlog.typing import FilteringBoundLogger

from relay.cluster.direct_subscription import subscribe
from relay.routing.port import NoResponderError

_STATUS = "Status"
_NO_RESPONDERS = "503"


class Replies:
    """The requests over ``client`` that wait for an answer."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._subject = client.new_inbox()
        self._numbers = count()
        self._waiting: dict[str, asyncio.Future[bytes]] = {}

    async def open(self, log: FilteringBoundLogger) -> None:
        """Subscribe to the answers, before the first request."""
        await subscribe(self.client, f"{self._subject}.*", self._take, log)

    async def to(
        self, subject: str, payload: bytes, timeout_s: float, headers: dict[str, str] | None = None
    ) -> bytes:
        """Return the answer to ``payload``, which is sent with ``headers``.

        Raises:
            NoResponderError: it was not delivered.
            TimeoutError: there was no answer in time; it may have been delivered.
            NatsError: the connection has ended; it was not sent.
        """
        loop = asyncio.get_running_loop()
        number, answer = str(next(self._numbers)), loop.create_future()
        # A timer that ends the one wait: ``asyncio.timeout`` costs twice as much.
        expiry = loop.call_later(timeout_s, _expire, answer)
        self._waiting[number] = answer
        try:
            await self.client.publish(subject, payload, f"{self._subject}.{number}", headers)
            data: bytes = await answer
        finally:
            expiry.cancel()
            del self._waiting[number]
        return data

    def _take(self, message: Msg) -> None:
        answer = self._waiting.get(message.subject.rpartition(".")[2])
        if answer is None or answer.done():
            return  # it comes after its deadline, or after what waited was cancelled
        if message.headers is not None and message.headers.get(_STATUS) == _NO_RESPONDERS:
            answer.set_exception(NoResponderError("no relay answers"))
        else:
            answer.set_result(message.data)


def _expire(answer: asyncio.Future[bytes]) -> None:
    if not answer.done():
        answer.set_exception(TimeoutError())
