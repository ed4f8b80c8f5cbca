"""Asks the relay that has the CA's key, over NATS, and answers there what the others ask.

What one relay asks is limited before it is passed on: a relay that is flooded must not take the whole CA.
Must not know what is issued, or to whom.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from attrs import define, field
from nats.aio.client import Client
from nats.aio.msg import Msg
from structlog.typing import FilteringBoundLogger

from relay.cluster.commands import CountCommand, Respond
from relay.cluster.connection import Replies
from relay.cluster.messages import AskedOfAuthority, AuthorityMessages, ClusterMessageError, authority_subject
from relay.cluster.sealed_link import NotMineError, SealedAsk, SealedLink
from relay.limits.rate_limits import BUSY_RETRY_MS, Allowance, KeyedLimiters
from relay.routing.authority_port import (
    AnsweringAuthority,
    AuthorityAction,
    AuthorityRefusedError,
    AuthorityUnavailableError,
)
from relay.routing.port import NoResponderError
from schemas.errors import ToolError

AT_ONCE = 8
"""How many requests are sent and not answered. The relay that answers makes four at a time."""
MAX_WAITING = 64
TIMEOUT_S = 6.0
"""From the request to its answer, waiting included: a node that enrols gives up after 10 s."""


@define(eq=False, repr=False, kw_only=True)
class AuthorityAsker:
    """A ``RemoteAuthority`` by ``link``, sealed or not.

    Of ``others``, one after the other is asked, until it is the one with the CA's key.
    """

    _link: SealedLink
    _others: Callable[[], Collection[str]]
    _messages: AuthorityMessages
    _count: CountCommand
    _log: FilteringBoundLogger
    _timeout_s: float = TIMEOUT_S
    _turns: asyncio.Semaphore = field(init=False, factory=lambda: asyncio.Semaphore(AT_ONCE))
    _waiting: int = field(init=False, default=0)
    _holder: str = field(init=False, default="")

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
        payload = self._messages.request(AskedOfAuthority(self._link.relay, action, members))
        self._waiting += 1
        try:
            async with asyncio.timeout(self._timeout_s), self._turns:
                # What names a relay is renewed over a channel alone, which proves that name.
                if self._link.is_sealed or members.get("use") == NAMES_RELAY:
                    data = await self._asked_sealed(payload)
                else:
                    subject = authority_subject(self._link.fleet)
                    data = await self._link.requests.request(subject, payload, self._timeout_s)
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

    async def _asked_sealed(self, payload: bytes) -> bytes:
        for relay in sorted(self._others(), key=lambda relay: relay != self._holder):
            try:
                data = await self._link.request(relay, CA, payload, self._timeout_s)
            except (NotMineError, NoResponderError):
                continue
            self._holder = relay
            return data
        raise NoResponderError("no relay has the key")


PER_RELAY = Allowance(rate=50, burst=100, concurrency=16)
"""Half of what the CA makes a second on one core, for each relay that asks."""
MAX_IN_FLIGHT = 64

CA = "ca"
"""The kind of a sealed question."""
NAMES_RELAY = "cluster"
"""The use of a certificate that names a relay to the others."""
_QUEUE = "authority"
_MAX_RELAYS = 64
_INTERNAL = AuthorityRefusedError("internal")
_BUSY = "rate_limited"


@define(eq=False, repr=False, kw_only=True)
class AuthorityAnswerer:
    """Gives requests to ``authority``. ``monotonic`` is in seconds."""

    _authority: AnsweringAuthority
    _link: SealedLink
    _messages: AuthorityMessages
    _monotonic: Callable[[], float]
    _count: CountCommand
    _log: FilteringBoundLogger
    _limiters: KeyedLimiters[str] = field(init=False)
    _running: set[asyncio.Task[None]] = field(init=False, factory=set)
    _replies: Replies = field(init=False, factory=Replies)

    def __attrs_post_init__(self) -> None:
        self._limiters = KeyedLimiters(self._monotonic, _MAX_RELAYS)
        self._link.answer(CA, self._asked_sealed)

    async def serve(self, client: Client) -> None:
        if self._link.is_sealed:
            await asyncio.Event().wait()
        await client.subscribe(
            authority_subject(self._link.fleet), _QUEUE, self._asked, pending_msgs_limit=MAX_IN_FLIGHT
        )
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Let what is being issued end: it is recorded when it ends, and cannot be taken back."""
        if self._running:
            await asyncio.wait(self._running)
        await self._replies.close()

    async def _asked(self, message: Msg) -> None:
        if not self._link.is_sealed:  # of the connection that ends
            self._take(message.data, partial(self._replies.send, message), None)

    def _asked_sealed(self, ask: SealedAsk) -> None:
        self._take(ask.body, ask.reply, ask)

    def _take(self, data: bytes, respond: Respond, proven: SealedAsk | None) -> None:
        try:
            asked = self._messages.read_request(data)
            if proven is not None:
                proven.check(asked.relay)
        except ClusterMessageError as error:
            self._log.warning("request to the CA of another relay dropped", reason=str(error))
            self._refuse(respond, _INTERNAL)
            return
        if len(self._running) >= MAX_IN_FLIGHT:
            self._refuse(respond, AuthorityRefusedError(_BUSY, BUSY_RETRY_MS))
            return
        relay = asked.relay if proven is None else proven.name
        task = asyncio.create_task(self._run(respond, asked._replace(relay=relay)))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _run(self, respond: Respond, asked: AskedOfAuthority) -> None:
        try:
            with self._limiters.held(asked.relay, PER_RELAY):
                members = await self._authority.answer(asked.relay, asked.action, asked.members)
            answer = self._messages.answer(asked.action, members)
        except ToolError as error:  # of the limiter
            self._refuse(respond, AuthorityRefusedError(_BUSY, error.retry_after_ms))
        except AuthorityRefusedError as error:
            self._refuse(respond, error)
        except Exception as error:  # noqa: BLE001 - a bug must fail one request, not the relay
            self._log.error("request to the CA of another relay failed", exc_info=error)
            self._refuse(respond, _INTERNAL)
        else:
            self._count("ok")
            respond(answer)

    def _refuse(self, respond: Respond, error: AuthorityRefusedError) -> None:
        self._count("refused")
        respond(self._messages.refusal(error))
