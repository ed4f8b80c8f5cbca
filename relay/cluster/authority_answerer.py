"""Answers, over NATS, what relays without the CA's key ask of the one that has it.

What one relay asks is limited before it is passed on: a relay that is flooded must not take the whole CA.
Must not know what is issued, or to whom.
"""

import asyncio
from collections.abc import Callable

from nats.aio.client import Client
from nats.aio.msg import Msg
from structlog.typing import FilteringBoundLogger

from relay.cluster.connection import respond
from relay.limits.rate_limits import BUSY_RETRY_MS, Allowance, KeyedLimiters
from relay.routing.authority_messages import AskedOfAuthority, AuthorityMessages, authority_subject
from relay.routing.authority_port import AnsweringAuthority, AuthorityRefusedError
from relay.routing.cluster_messages import ClusterMessageError
from relay.routing.nats import CountCommand
from schemas.errors import ToolError

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
        """Answer on ``client`` until cancelled."""
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
