import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import pytest_asyncio
from nats.aio.client import Client
from nats.aio.msg import Msg

from relay.cluster.direct_subscription import subscribe
from relay.cluster.replies import Replies
from schemas.process.logs import make_logger
from tests.fakes.cluster_server import NatsServer
from tests.fakes.lines import LogLines
from tests.fakes.polling import BOUND_S, until

pytestmark = pytest.mark.integration

SUBJECT = "edge.main.test"


@asynccontextmanager
async def connected(server: NatsServer) -> AsyncIterator[Client]:
    client = Client()
    await client.connect(
        server.url, inbox_prefix="edge.main.inbox", nkeys_seed_str=server.credentials.read_text().strip()
    )
    try:
        yield client
    finally:
        await client.close()


class Answerer:
    """Another client, which keeps what it is asked until the test answers."""

    def __init__(self, client: Client, lines: LogLines) -> None:
        self.client = client
        self.lines = lines
        self.asked: list[Msg] = []
        self.bugs = 0

    async def listen(self) -> None:
        await subscribe(self.client, SUBJECT, self._take, make_logger("relay", self.lines))
        # Not ``flush``: the library sends its ping before the subscription, which waits to be written.
        await self.client.publish(SUBJECT, b"")
        await until(lambda: bool(self.asked))
        self.asked.clear()

    def _take(self, message: Msg) -> None:
        if self.bugs:
            self.bugs -= 1
            raise ValueError("a bug")
        self.asked.append(message)


@pytest_asyncio.fixture
async def answerer(nats: NatsServer) -> AsyncIterator[Answerer]:
    async with connected(nats) as client:
        answerer = Answerer(client, LogLines())
        await answerer.listen()
        yield answerer


@pytest_asyncio.fixture
async def replies(nats: NatsServer) -> AsyncIterator[Replies]:
    async with AsyncExitStack() as stack:
        replies = Replies(await stack.enter_async_context(connected(nats)))
        await replies.open(make_logger("relay", LogLines()))
        yield replies


async def test_answers_find_their_requests_in_any_order(replies: Replies, answerer: Answerer) -> None:
    payloads = [b"one", b"two", b"three"]
    requests = [asyncio.create_task(replies.to(SUBJECT, payload, BOUND_S)) for payload in payloads]
    await until(lambda: len(answerer.asked) == len(payloads))
    for message in reversed(answerer.asked):
        await message.respond(b"to " + message.data)
    assert await asyncio.gather(*requests) == [b"to one", b"to two", b"to three"]


async def test_an_answer_after_the_deadline_is_no_answer_to_the_next_request(
    replies: Replies, answerer: Answerer
) -> None:
    with pytest.raises(TimeoutError):
        await replies.to(SUBJECT, b"late", 0.02)
    await until(lambda: len(answerer.asked) == 1)
    following = asyncio.create_task(replies.to(SUBJECT, b"next", BOUND_S))
    await until(lambda: len(answerer.asked) == 2)
    for message in answerer.asked:
        await message.respond(b"to " + message.data)
    assert await following == b"to next"


async def test_two_answers_to_one_request_are_one(replies: Replies, answerer: Answerer) -> None:
    request = asyncio.create_task(replies.to(SUBJECT, b"", BOUND_S))
    await until(lambda: len(answerer.asked) == 1)
    await answerer.asked[0].respond(b"first")
    await answerer.asked[0].respond(b"second")
    assert await request == b"first"


async def test_a_bug_loses_one_message_and_no_other(replies: Replies, answerer: Answerer) -> None:
    answerer.bugs = 1
    lost = asyncio.create_task(replies.to(SUBJECT, b"lost", BOUND_S))
    entry = await answerer.lines.until("message of another relay not handled")
    assert "ValueError" in entry["exception"]
    following = asyncio.create_task(replies.to(SUBJECT, b"next", BOUND_S))
    await until(lambda: len(answerer.asked) == 1)
    await answerer.asked[0].respond(b"to next")
    assert await following == b"to next"
    lost.cancel()
