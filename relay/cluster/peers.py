"""Asks other relays of the fleet over NATS, and answers them: ``Peers``.

In a fleet that is sealed they are asked by sealed channels. Until then a relay is asked on a subject of its
own, so that what it has to subscribe to does not grow with the fleet.
Must not know what is asked: a handler for each kind does.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from attrs import define, field
from nats.aio.client import Client
from nats.aio.msg import Msg
from structlog.typing import FilteringBoundLogger

from relay.cluster.connection import Replies
from relay.cluster.messages import MAX_PEER_BYTES, ClusterMessageError, CountMessage, PeerMessages
from relay.cluster.sealed_link import NotMineError, SealedAsk, SealedLink
from relay.routing.port import Asker, PeerHandler
from schemas.callbacks import Handlers
from schemas.errors import Failure, ToolError
from schemas.ulids import UlidSource

MAX_IN_FLIGHT = 4096
"""How many questions of other relays are answered at once: most of them wait for events of a session."""

_CANCEL = "cancel"
_BUSY_RETRY_MS = 100


@define(eq=False, repr=False, kw_only=True)
class RelayPeers:
    """The other relays of the fleet of ``link``; ``running`` returns those that run.

    ``relay_of`` returns the one that a node is connected to.
    """

    _link: SealedLink
    _messages: PeerMessages
    running: Callable[[], Collection[str]]
    relay_of: Callable[[str], str | None]
    _ulids: UlidSource
    _count: CountMessage
    _log: FilteringBoundLogger
    _handlers: Handlers[str, PeerHandler] = field(init=False, factory=Handlers[str, PeerHandler])
    _answering: dict[tuple[str, str], asyncio.Task[None]] = field(init=False, factory=dict)
    _replies: Replies = field(init=False, factory=Replies)
    relay: str = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.relay = self._link.relay
        self._link.answer(_CANCEL, self._asked_sealed)

    def answer(self, kind: str, handler: PeerHandler) -> None:
        self._handlers.add(kind, handler)
        self._link.answer(kind, self._asked_sealed)

    async def ask(
        self, relay: str, kind: str, body: Mapping[str, Any], timeout_s: float, token: str = ""
    ) -> Mapping[str, Any]:
        ask_id = self._ulids.new()
        payload = self._messages.ask(ask_id, body)
        if len(payload) > MAX_PEER_BYTES:
            raise ToolError(Failure.ARGUMENTS_INVALID, "The arguments are too large.")
        try:
            return self._messages.read_reply(await self._asked(relay, kind, payload, timeout_s, token))
        except NotMineError:
            raise ToolError(Failure.INTERNAL, "Another relay does not know the question.") from None
        except (asyncio.CancelledError, TimeoutError):
            await self._cancel(relay, self._messages.ask(ask_id, {}))
            raise
        except ClusterMessageError as error:
            self._log.warning("answer of another relay dropped", reason=str(error))
            raise ToolError(Failure.INTERNAL, "Another relay gave an answer that is not valid.") from None

    async def _asked(self, relay: str, kind: str, payload: bytes, timeout_s: float, token: str) -> bytes:
        if self._link.is_sealed:
            return await self._link.request(relay, kind, payload, timeout_s, token)
        return await self._link.requests.request(self._subject(relay, kind), payload, timeout_s)

    async def _cancel(self, relay: str, payload: bytes) -> None:
        if self._link.is_sealed:
            await self._link.send(relay, _CANCEL, payload)
        else:
            await self._link.requests.publish(self._subject(relay, _CANCEL), payload)

    async def serve(self, client: Client) -> None:
        if self._link.is_sealed:
            await asyncio.Event().wait()
        subject = self._subject(self.relay, "*")
        await client.subscribe(subject, cb=self._received, pending_msgs_limit=MAX_IN_FLIGHT)
        await asyncio.Event().wait()

    async def close(self) -> None:
        if answering := list(self._answering.values()):
            for task in answering:
                task.cancel()
            await asyncio.wait(answering)
        await self._replies.close()

    def _subject(self, relay: str, kind: str) -> str:
        return f"edge.{self._link.fleet}.relay.{relay}.{kind}"

    async def _received(self, message: Msg) -> None:
        if self._link.is_sealed:
            return  # of the connection that ends
        kind = message.subject.rpartition(".")[2]
        self._take(kind, message.data, partial(self._replies.send, message), None)

    def _asked_sealed(self, ask: SealedAsk) -> None:
        self._take(ask.kind, ask.body, ask.reply, ask)

    def _take(
        self, kind: str, data: bytes, respond: Callable[[bytes], None], proven: SealedAsk | None
    ) -> None:
        """Have a question answered; ``proven`` says which relay's it is, where it was sealed."""
        handler = self._handlers.get(kind)
        try:
            asked = self._messages.read_ask(data, kind if kind != _CANCEL else None)
            if proven is not None:
                proven.check(asked.relay)
        except ClusterMessageError as error:
            self._log.warning("question of another relay dropped", kind=kind, reason=str(error))
            respond(self._messages.failure(ToolError(Failure.INTERNAL)))
            return
        key = (asked.relay, asked.ask_id)
        if kind == _CANCEL:
            if (running := self._answering.get(key)) is not None:
                running.cancel()
            return
        if handler is None or key in self._answering:
            respond(self._messages.failure(ToolError(Failure.INTERNAL)))
            return
        if len(self._answering) >= MAX_IN_FLIGHT:
            self._count(kind, "answered", "refused")
            respond(self._messages.failure(ToolError(Failure.RATE_LIMITED, retry_after_ms=_BUSY_RETRY_MS)))
            return
        asker = Asker(asked.relay, None if proven is None else proven.beside)
        task = self._answering[key] = asyncio.create_task(
            self._answer(respond, kind, handler, asker, asked.body)
        )
        task.add_done_callback(lambda _: self._answering.pop(key, None))

    async def _answer(
        self,
        respond: Callable[[bytes], None],
        kind: str,
        handler: PeerHandler,
        asker: Asker,
        body: Mapping[str, Any],
    ) -> None:
        try:
            reply = self._messages.reply(await handler(asker, body))
        except ToolError as error:
            reply = self._messages.failure(error)
        except Exception as error:  # noqa: BLE001 - a bug must fail one question, not the relay
            self._log.error("question of another relay failed", kind=kind, exc_info=error)
            reply = self._messages.failure(ToolError(Failure.INTERNAL))
        if len(reply) > MAX_PEER_BYTES:
            self._log.error("answer to another relay too large", kind=kind, size=len(reply))
            reply = self._messages.failure(ToolError(Failure.RESULT_INVALID))
        respond(reply)
