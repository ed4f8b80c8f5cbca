"""What the relays share in JetStream: appended at an expected sequence number, and in how many copies.

Of two that append at once, one does. Three copies are kept, and one where there is a single server: of a
cluster that has lost a server nothing is made with fewer, which would be lost with the next one. So two
servers are never enough. Must not know what is kept.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from nats.js import JetStreamContext
from nats.js.api import StreamInfo
from nats.js.errors import APIError

from schemas.error_roots import PeerError

_WRONG_LAST_SEQUENCE = {10071, 10164}
"""The second is of servers that do not know the number yet: another entry is on its way to it."""


async def append(
    context: JetStreamContext, subject: str, data: bytes, *, expected: Mapping[str, str], kept_s: int | None
) -> int | None:
    """Append ``data``; return its sequence number, or None if the stream is not as ``expected``.

    ``kept_s`` is for how many seconds the servers keep it; None: without an end.

    Raises:
        NatsError, TimeoutError: the servers do not take it.
    """
    try:
        appended = await context.publish(subject, data, headers=dict(expected), msg_ttl=kept_s)
    except APIError as error:
        if error.err_code not in _WRONG_LAST_SEQUENCE:
            raise
        return None
    return appended.seq


COPIES = 3
_SINGLE_SERVER = 10074
"""The error code of JetStream for copies that are asked of a server without others."""
_NO_PEERS = 10005
"""That of a cluster in which fewer servers run than copies are asked of."""

MadeT = TypeVar("MadeT")


class TooFewServersError(PeerError):
    """A cluster has fewer servers than there are to be copies; the text says what to do."""

    def __str__(self) -> str:
        return f"fewer than {COPIES} servers of the cluster run: start {COPIES}, or one that is no cluster"


async def in_copies(make: Callable[[int], Awaitable[MadeT]]) -> MadeT:
    """Return what ``make`` makes with that many copies.

    Raises:
        TooFewServersError: fewer than three servers of a cluster run.
        APIError: it is not made for another reason.
    """
    try:
        return await make(COPIES)
    except APIError as error:
        if error.err_code == _NO_PEERS:
            raise TooFewServersError from None
        if error.err_code != _SINGLE_SERVER:
            raise
        return await make(1)


async def grow(context: JetStreamContext, info: StreamInfo) -> None:
    """Have a stream that was made on a single server copied, now that the servers are a cluster.

    What cannot be done now, since too few of them run, or they do not permit it, is tried again with the next
    connection.
    """
    copies = info.config.num_replicas or 1
    if info.cluster is None or copies >= COPIES:
        return
    try:
        await context.update_stream(info.config, num_replicas=COPIES)
    except (APIError, TimeoutError):
        return
