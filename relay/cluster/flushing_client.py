"""A client of NATS whose ``flush`` waits for what was sent before it.

The library writes its PING ahead of the lines that wait for its writer. An UNSUB may be among these, so that
a drained subscription is removed here while the server still sends to it, and what it sends last is dropped.
Must not connect.
"""

from contextlib import suppress

from nats.aio.client import DEFAULT_FLUSH_TIMEOUT, Client
from nats.errors import NoRespondersError


class FlushingClient(Client):
    """A client that may publish to ``probe``, a subject that has no responder."""

    def __init__(self, probe: str) -> None:
        super().__init__()
        self._probe = probe

    async def flush(self, timeout: float = DEFAULT_FLUSH_TIMEOUT) -> None:  # noqa: ASYNC109 - the library's
        """Return once the server has done what was sent before, and what it sent meanwhile has arrived.

        It does all of one connection in order, and the request is behind the lines that wait.

        Raises:
            NatsError: the connection has ended, or the server does not answer within ``timeout`` seconds.
        """
        with suppress(NoRespondersError):
            await self.request(self._probe, b"", timeout)
