"""A live relay and a hostile client of its HTTP port: whatever it sends, it gets declared answers or none.

An input is the bytes that the client sends: ``@TOKEN@`` stands for a good token of an agent, ``@HOST@`` for
the relay's name, and at ``@CUT@`` a write ends. Another client asks the same relay after every input.
"""

import asyncio
import re
from functools import cache
from typing import Final

from tests.fakes.served_relay import ServedRelay
from tests.fuzz.http_samples import HTTP_REQUESTS
from tests.fuzz.live import BETWEEN_INPUTS_S, MOST_TASKS, check_log, kept
from tests.fuzz.live_relay import opened
from tests.fuzz.target import Target

_MAX_WRITES: Final = 16
_SETTLED_S: Final = 0.5
_STATUS: Final = re.compile(rb"HTTP/1\.1 ([0-9]{3}) ")
_STATUSES: Final = {200, 202, 400, 401, 403, 404, 405, 406, 413, 415, 421, 426, 429, 503}
_RESULT: Final = re.compile(rb'\{"jsonrpc":"2\.0"[^\r]*"result":')


class HttpStage:
    """The relay, and an agent's token."""

    def __init__(self, relay: ServedRelay) -> None:
        self._relay = relay
        self._token = relay.hub.token().encode()

    async def play(self, data: bytes) -> None:
        """Send ``data``, look at what comes back, and ask as another client."""
        written = data.replace(b"@TOKEN@", self._token).replace(b"@HOST@", str(self._relay.address).encode())
        answer = await self._answered(written.split(b"@CUT@", _MAX_WRITES))
        self._check(answer, has_token=self._token in written)
        assert (await self._relay.ask("GET /healthz")).status == 200
        await asyncio.sleep(BETWEEN_INPUTS_S)
        check_log(self._relay.hub.lines)
        assert len(asyncio.all_tasks()) < MOST_TASKS

    async def _answered(self, pieces: list[bytes]) -> bytes:
        """Return all that comes back until nothing more does."""
        reader, writer = await self._relay.connect()
        answer = b""
        try:
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0)
            async with asyncio.timeout(_SETTLED_S):
                while piece := await reader.read(1 << 16):
                    answer += piece
        except (TimeoutError, ConnectionError):
            pass
        finally:
            writer.transport.abort()
        return answer

    def _check(self, answer: bytes, *, has_token: bool) -> None:
        assert not answer or _STATUS.match(answer), answer[:200]
        assert has_token or not _RESULT.search(answer), answer[:500]
        # The WebSocket library repeats a malformed header to the client that has sent it.
        assert self._token not in answer or b"invalid Sec-WebSocket-" in answer
        if answer.startswith(b"HTTP/1.1 101 "):
            return  # a node's connection from here on
        found = {int(status) for status in _STATUS.findall(answer)}
        assert found <= _STATUSES | {100, 101}, found


@cache
def _stage() -> HttpStage:
    return HttpStage(kept().run(opened("http")))


def live_http(data: bytes) -> None:
    """Every answer is a declared one, no result goes to a client without a token, and others are served."""
    kept().run(_stage().play(data))


TARGETS: Final = {"live_http": Target(live_http, HTTP_REQUESTS, share=8)}
