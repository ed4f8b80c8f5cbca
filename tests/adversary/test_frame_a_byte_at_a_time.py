"""Attacker: a slow stranger, or many of them. Tried: to hold a place at the nodes' endpoint by sending a
frame that never ends a byte at a time, in fragments, with a ping now and then, or by saying nothing at all.

What must happen: 4001 when the time for authentication is over, however much has come until then, and a
``node_refused`` line. The connection ends even if the attacker neither answers the close nor closes.
More than a handful of frames is another attack, and ends sooner.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from itertools import chain, repeat

import pytest
import pytest_asyncio

from tests.fakes.hub import Hub
from tests.fakes.raw_http import until_closed, until_cut, ws_frame
from tests.fakes.served_relay import HERE, ServedRelay
from tests.fakes.serving import Server

pytestmark = pytest.mark.asyncio(loop_scope="module")

AUTH_TIMEOUT_S = 0.1
BETWEEN_BYTES_S = 0.002
_PING, _CONTINUATION = 9, 0


@pytest_asyncio.fixture(loop_scope="module")
async def relay(hub: Hub, server: Server) -> AsyncIterator[ServedRelay]:
    """A relay whose timeout fits into a test."""
    async with ServedRelay.open(hub, server, auth_timeout_s=AUTH_TIMEOUT_S) as relay:
        yield relay


def single_bytes(frame: bytes) -> Iterator[bytes]:
    return (frame[index : index + 1] for index in range(len(frame)))


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([], id="nothing"),
        pytest.param(single_bytes(ws_frame(b'{"type":"auth",'.ljust(8192))), id="a byte of a frame"),
        pytest.param(repeat(ws_frame(b"", opcode=_PING), 5), id="pings"),
        pytest.param(
            chain([ws_frame(b"{", fin=False)], repeat(ws_frame(b"", opcode=_CONTINUATION, fin=False), 5)),
            id="empty fragments",
        ),
    ],
)
async def test_who_takes_his_time_is_closed_when_it_is_over(
    relay: ServedRelay, pieces: Iterator[bytes]
) -> None:
    reader, writer = await relay.upgraded()
    closing = asyncio.create_task(until_closed(reader))
    for piece in pieces:
        writer.write(piece)
        # Not a pause: the wait ends as soon as the relay closes.
        if (await asyncio.wait([closing], timeout=BETWEEN_BYTES_S))[0]:
            break
    assert await closing == 4001
    writer.close()
    assert relay.refusals() == [("node_refused", HERE, "late", 1)]


@pytest.mark.long
async def test_who_does_not_answer_the_close_is_hung_up_on(relay: ServedRelay) -> None:
    reader, writer = await relay.upgraded()
    assert await until_cut(reader, writer) == 4001
