"""Asks the relay that has the CA's key, over NATS, and answers there what the others ask.

What one relay asks is limited before it is passed on: a relay that is flooded must not take the whole CA.
Must not know what is issued, or to whom.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg
from structlog.typing import FilteringBoundLogger

from relay.cluster.commands import CountCommand, Requests
from relay.cluster.connection import respond
from relay.cluster.messages import AskedOfAuthority, AuthorityMessages, ClusterMessageError, authority_subject
from relay.limits.rate_limits import BUSY_RETRY_MS, Allowance, KeyedLimiters
from relay.routing.authority_port import (
    AnsweringAuthority,
    AuthorityAction,
    AuthorityRefusedError,
    AuthorityUnavailableError,
)
from relay.routing.peers import NoResponderError
from schemas.errors import ToolError

AT_ONCE = 8
"""How many requests are sent and not answered. The relay that answers makes four at a time."""
MAX_WAITING = 64
TIMEOUT_S = 6.0
"""From the request to its answer, waiting included: a node that enrols gives up after 10 s."""


class AuthorityAsker:
    """A ``RemoteAuthority`` by ``requests``. ``relay`` names this process to the others."""

    def __init__(  # noqa: PLR0913 - what comes in from outside
        self,
        *,
        requests: Requests,
        messages: AuthorityMessages,
        fleet: str,
        relay: str,
        count: CountCommand,
        log: FilteringBoundLogger,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._requests = requests
        self._messages = messages
        self._subject = authority_subject(fleet)
        self._relay = relay
        self._count = count
        self._log = log
        self._timeout_s = timeout_s
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._waiting = 0

    async def ask(self, action: AuthorityAction, members: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            answer = await self._asked(action, members)
        except AuthorityUnavailableError:
            self._count("away")
            raise
        except AuthorityRefusedError:
            self._count("refused")
            raise
        self._count("ok")
        return answer

    async def _asked(self, action: AuthorityAction, members: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._waiting >= MAX_WAITING:
            raise AuthorityUnavailableError("too many requests wait for the relay with the CA's key")
        payload = self._messages.request(AskedOfAuthority(self._relay, action, members))
        self._waiting += 1
        try:
            async with asyncio.timeout(self._timeout_s), self._turns:
                data = await self._requests.request(self._subject, payload, self._timeout_s)
            return self._messages.read_answer(data, action)
        except NoResponderError:
            raise AuthorityUnavailableError("no relay with the CA's key is connected") from None
        except TimeoutError:
            raise AuthorityUnavailableError("the relay with the CA's key does not answer in time") from None
        except ClusterMessageError as error:
            self._log.warning("answer of the relay with the CA's key dropped", reason=str(error))
            raise AuthorityUnavailableError("the relay with the CA's key gives no valid answer") from None
        finally:
            self._waiting -= 1


PER_RELAY = Allowance(rate=50, burst=100, concurrency=16)
"""Half of what the CA makes a second on one core, for each relay that asks."""
MAX_IN_FLIGHT = 64

_QUEUE = "authority"
_MAX_RELAYS = 64
_INTERNAL = AuthorityRefusedError("internal")
_BUSY = "rate_limited"


class AuthorityAnswerer:
    """Gives requests to ``authority``. ``monotonic`` is in seconds."""

    def __init__(  # noqa: PLR0913 - what comes in from outside
        self,
        *,
        authority: AnsweringAuthority,
        messages: AuthorityMessages,
        fleet: str,
        monotonic: Callable[[], float],
        count: CountCommand,
        log: FilteringBoundLogger,
    ) -> None:
        self._authority = authority
        self._messages = messages
        self._subject = authority_subject(fleet)
        self._limiters = KeyedLimiters[str](monotonic, _MAX_RELAYS)
        self._count = count
        self._log = log
        self._running: set[asyncio.Task[None]] = set()

    async def serve(self, client: Client) -> None:
        await client.subscribe(self._subject, _QUEUE, self._asked, pending_msgs_limit=MAX_IN_FLIGHT)
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Let what is being issued end: it is recorded when it ends, and cannot be taken back."""
        if self._running:
            await asyncio.wait(self._running)

    async def _asked(self, message: Msg) -> None:
        try:
            asked = self._messages.read_request(message.data)
        except ClusterMessageError as error:
            self._log.warning("request to the CA of another relay dropped", reason=str(error))
            await self._refuse(message, _INTERNAL)
            return
        if len(self._running) >= MAX_IN_FLIGHT:
            await self._refuse(message, AuthorityRefusedError(_BUSY, BUSY_RETRY_MS))
            return
        task = asyncio.create_task(self._run(message, asked))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _run(self, message: Msg, asked: AskedOfAuthority) -> None:
        try:
            with self._limiters.held(asked.relay, PER_RELAY):
                members = await self._authority.answer(asked.relay, asked.action, asked.members)
            answer = self._messages.answer(asked.action, members)
        except ToolError as error:  # of the limiter
            await self._refuse(message, AuthorityRefusedError(_BUSY, error.retry_after_ms))
        except AuthorityRefusedError as error:
            await self._refuse(message, error)
        except Exception as error:  # noqa: BLE001 - a bug must fail one request, not the relay
            self._log.error("request to the CA of another relay failed", exc_info=error)
            await self._refuse(message, _INTERNAL)
        else:
            self._count("ok")
            await respond(message, answer)

    async def _refuse(self, message: Msg, error: AuthorityRefusedError) -> None:
        self._count("refused")
        await respond(message, self._messages.refusal(error))
