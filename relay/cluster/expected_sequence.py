"""Appends to a stream of JetStream at an expected sequence number: of two that append at once, one does.

Must not know what is appended.
"""

from collections.abc import Mapping

from nats.js import JetStreamContext
from nats.js.errors import APIError

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
