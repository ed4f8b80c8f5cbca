"""Commands between relays: the ``NodeRouter`` that asks the relay with the session, and what answers.

A node whose session is in this process is reached without NATS. In a fleet that is sealed, any other command
goes to the relay that presence names, and if that proves not to hold the node, to the next. Until then one
request goes to the subject of the node, which the relay that holds its session answers; that there is no such
relay is known at once. That relay has one subscription for each node, in a queue group: of two relays that
believe to hold a node, one is asked. It does not decide who may call: the relay that asks has decided and
recorded that. It records the command too.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from attrs import define, field
from nats.aio.client import Client
from nats.aio.msg import Msg
from structlog.typing import FilteringBoundLogger

from relay.cluster.client import subscribe
from relay.cluster.connection import Replies
from relay.cluster.messages import (
    CALLER_HEADER,
    MAX_MESSAGE_BYTES,
    AskedCommand,
    ClusterMessageError,
    ClusterMessages,
    cancel_subject,
    command_headers,
    command_subject,
)
from relay.cluster.sealed_link import NotMineError, SealedAsk, SealedLink
from relay.routing.port import Command, CommandAnswer, LocalRouter, NodeRef, NoResponderError
from schemas.delivery import TransitGauge
from schemas.error_roots import StateError
from schemas.errors import Failure, ToolError
from schemas.payloads import CmdAck

if TYPE_CHECKING:
    from nats.aio.subscription import Subscription

COMMAND, CANCEL = "command", "cancel_command"
"""The kinds of sealed questions."""
RecordCommand = Callable[[str, Command], None]
"""Records that the relay named first has asked for a command. Raises StateError: it must not be run."""
Respond = Callable[[bytes], None]
"""Sends the answer to one command."""
CountCommand = Callable[[str], None]
"""Counts a command by its outcome: ``ok``, the code of its failure, ``cancelled``, or ``dropped``."""


@define(eq=False, repr=False, kw_only=True)
class NatsRouter:
    """Routes to ``local`` the commands for nodes that this process ``holds``.

    All others go by ``link``, sealed or not. ``holders`` returns the relays that may hold a node, the
    likeliest first. ``ticks_ms`` is a clock that cannot be set.
    """

    _local: LocalRouter
    _holds: Callable[[str], bool]
    _link: SealedLink
    _holders: Callable[[str], Iterable[str]]
    _messages: ClusterMessages
    _ticks_ms: Callable[[], int]
    _count: CountCommand
    _log: FilteringBoundLogger

    async def run(self, command: Command) -> CmdAck:
        if self._holds(command.node_id):
            return await self._local.start(command)
        try:
            answer = await (self._asked_sealed(command) if self._link.is_sealed else self._asked(command))
        except ToolError as error:
            self._count(error.failure.value.code)
            raise
        except asyncio.CancelledError:
            self._count("cancelled")
            raise
        self._count("ok")
        return answer

    def _written(self, command: Command, now_ms: int) -> bytes:
        payload = self._messages.command(AskedCommand(command, self._link.relay, now_ms))
        if len(payload) > MAX_MESSAGE_BYTES:
            # Arguments within their schema fit; in any case, nothing was sent.
            raise ToolError(Failure.INTERNAL, "The command does not fit a message.")
        return payload

    async def _asked_sealed(self, command: Command) -> CmdAck:
        """Ask one relay after the other, until one does not prove that it has done nothing."""
        until_ms = self._ticks_ms() + command.deadline_ms
        for relay in self._holders(command.node_id):
            now_ms = self._ticks_ms()
            if (left_ms := until_ms - now_ms) <= 0:
                break
            payload = self._written(command._replace(deadline_ms=left_ms), now_ms)
            try:
                data = await self._link.request(relay, COMMAND, payload, left_ms / 1000, command.caller or "")
            except (NotMineError, NoResponderError):
                continue
            except TimeoutError:
                raise ToolError(Failure.DEADLINE_EXCEEDED) from None
            except asyncio.CancelledError:
                cancel = self._messages.cancel(self._link.relay, command.correlation_id)
                await self._link.send(relay, CANCEL, cancel)
                raise
            return self._read(command, data)
        raise ToolError(Failure.NODE_OFFLINE)

    def _read(self, command: Command, data: bytes) -> CmdAck:
        try:
            return self._messages.read_answer(data)
        except ClusterMessageError as error:
            self._log.warning(
                "answer of another relay dropped",
                node_id=command.node_id,
                correlation_id=command.correlation_id,
                reason=str(error),
            )
            raise ToolError(Failure.INTERNAL, "Another relay gave an answer that is not valid.") from None

    async def _asked(self, command: Command) -> CmdAck:
        payload = self._written(command, self._ticks_ms())
        subject, timeout_s = command_subject(self._link.fleet, command.node_id), command.deadline_ms / 1000
        try:
            data = await self._link.requests.request(subject, payload, timeout_s, command_headers(command))
            return self._read(command, data)
        except NoResponderError:
            raise ToolError(Failure.NODE_OFFLINE) from None
        except TimeoutError:
            # The other relay ends the command by the same deadline: there is nothing to cancel.
            raise ToolError(Failure.DEADLINE_EXCEEDED) from None
        except asyncio.CancelledError:
            cancel = self._messages.cancel(self._link.relay, command.correlation_id)
            await self._link.requests.publish(cancel_subject(self._link.fleet), cancel)
            raise


MAX_IN_FLIGHT = 4096
"""How many commands of other relays run at once. What a node announces bounds it far below that."""

_QUEUE = "owner"
_MAX_RELAYS = 64
_BUSY_RETRY_MS = 100


@define(eq=False, repr=False, kw_only=True)
class CommandOwner:
    """Gives commands to ``router``, each once ``record`` has returned. ``ticks_ms`` cannot be set."""

    _router: LocalRouter
    _link: SealedLink
    _record: RecordCommand
    _messages: ClusterMessages
    _ticks_ms: Callable[[], int]
    _count: CountCommand
    _log: FilteringBoundLogger
    _held: set[str] = field(init=False, factory=set)
    _changed: set[str] = field(init=False, factory=set)
    _wake: asyncio.Event = field(init=False, factory=asyncio.Event)
    _running: dict[str, CommandAnswer] = field(init=False, factory=dict)
    _replies: Replies = field(init=False, factory=Replies)
    _gauges: OrderedDict[str, TransitGauge] = field(init=False, factory=OrderedDict)

    def __attrs_post_init__(self) -> None:
        self._link.answer(COMMAND, self._asked_sealed)
        self._link.answer(CANCEL, lambda ask: self._cancel(ask.body))

    def holds(self, node_id: str) -> bool:
        return node_id in self._held

    def connection_changed(self, node: NodeRef, connected: bool) -> None:  # noqa: FBT001 - a ConnectionHandler
        if connected:
            self._held.add(node.node_id)
        else:
            self._held.discard(node.node_id)
        self._changed.add(node.node_id)
        self._wake.set()

    async def serve(self, client: Client) -> None:
        if self._link.is_sealed:
            await asyncio.Event().wait()
        subscribed: dict[str, Subscription] = {}
        self._changed = set(self._held)
        await subscribe(client, cancel_subject(self._link.fleet), self._cancelled, self._log)
        while True:
            changed, self._changed = self._changed, set()
            for node_id in (changed & self._held) - subscribed.keys():
                subject = command_subject(self._link.fleet, node_id)
                subscribed[node_id] = await subscribe(client, subject, self._asked, self._log, _QUEUE)
            lost = [subscribed.pop(node_id) for node_id in changed - self._held if node_id in subscribed]
            # Drained: a command that was on its way is answered too, and need not wait for its deadline.
            await asyncio.gather(*map(_drained, lost))
            if not self._changed:
                self._wake.clear()
                await self._wake.wait()

    async def close(self) -> None:
        """End the commands that run, and the answers that are not sent yet."""
        for answer in list(self._running.values()):
            answer.cancel()
        await self._replies.close()

    def _asked(self, message: Msg) -> None:
        if self._link.is_sealed:
            return  # of the connection that ends
        respond = partial(self._replies.send, message)
        try:
            asked = self._read(message.data, (message.headers or {}).get(CALLER_HEADER, ""))
            self._check_subject(message.subject, asked)
        except ClusterMessageError as error:
            self._drop(respond, error)
        else:
            self._run(asked, asked.relay, respond)

    def _asked_sealed(self, ask: SealedAsk) -> None:
        try:
            asked = self._read(ask.body, ask.beside)
            ask.check(asked.relay)
        except ClusterMessageError as error:
            self._drop(ask.reply, error)
            return
        delay_ms = self._ticks_ms() - asked.sent_at_ms - ask.ahead_ms
        if asked.command.node_id not in self._held:
            ask.not_mine()
        elif delay_ms >= asked.command.deadline_ms:
            self._count(Failure.DEADLINE_EXCEEDED.value.code)
            ask.late()
        else:
            self._run(asked, ask.name, ask.reply, delay_ms)

    def _read(self, data: bytes, caller: str) -> AskedCommand:
        asked = self._messages.read_command(data, caller)
        # By its document the tool has four parts, the second of which is the node.
        if asked.command.tool.split(".")[1] != asked.command.node_id:
            raise ClusterMessageError("a command is for another node than its tool")
        return asked

    def _check_subject(self, subject: str, asked: AskedCommand) -> None:
        if subject != command_subject(self._link.fleet, asked.command.node_id):
            raise ClusterMessageError("a command is for another node than its subject")

    def _drop(self, respond: Respond, error: ClusterMessageError) -> None:
        self._log.warning("command of another relay dropped", reason=str(error))
        self._refuse(respond, ToolError(Failure.INTERNAL))

    def _run(self, asked: AskedCommand, relay: str, respond: Respond, least_delay_ms: int = 0) -> None:
        correlation_id = asked.command.correlation_id
        try:
            self._check_free(correlation_id)
            command = self._with_budget_left(asked, least_delay_ms)
            self._record(relay, command)
            answer = self._router.start(command)
        except ToolError as error:
            self._refuse(respond, error)
        except StateError as error:
            self._log.error(
                "command of another relay not recorded", correlation_id=correlation_id, reason=str(error)
            )
            self._refuse(respond, ToolError(Failure.INTERNAL))
        except Exception as error:  # noqa: BLE001 - a bug must fail one command, not the relay
            self._refuse(respond, self._failed(correlation_id, error))
        else:
            self._running[correlation_id] = answer
            answer.at_end(partial(self._ended, respond, correlation_id))

    def _check_free(self, correlation_id: str) -> None:
        """Return if another command can be run.

        Raises:
            ToolError: it cannot.
        """
        if len(self._running) + len(self._replies) >= MAX_IN_FLIGHT:
            raise ToolError(Failure.RATE_LIMITED, retry_after_ms=_BUSY_RETRY_MS)
        if correlation_id in self._running:
            # One call makes one command: this one is a copy.
            raise ToolError(Failure.INTERNAL)

    def _failed(self, correlation_id: str, error: BaseException) -> ToolError:
        self._log.error("command failed", correlation_id=correlation_id, exc_info=error)
        return ToolError(Failure.INTERNAL)

    def _ended(self, respond: Respond, correlation_id: str, answer: CommandAnswer) -> None:
        """Send what became of a command, in the turn in which the node's frame was read."""
        self._running.pop(correlation_id, None)
        if answer.cancelled():
            self._count("cancelled")
        elif (error := answer.exception()) is None:
            self._pass_on(respond, correlation_id, answer.result())
        elif isinstance(error, ToolError):
            self._refuse(respond, error)
        else:
            self._refuse(respond, self._failed(correlation_id, error))

    def _pass_on(self, respond: Respond, correlation_id: str, ack: CmdAck) -> None:
        """Send the node's answer, unless it is longer in ASCII than a message may be."""
        data = self._messages.ack(ack)
        if len(data) > MAX_MESSAGE_BYTES:
            self._log.warning(
                "answer too large for another relay", correlation_id=correlation_id, size=len(data)
            )
            self._refuse(respond, ToolError(Failure.RESULT_INVALID))
        else:
            self._count("ok")
            respond(data)

    def _with_budget_left(self, asked: AskedCommand, least_delay_ms: int) -> Command:
        """Return the command with what its way has left of its budget, measured as a node does.

        By that, the first one seems to take no time; of a sealed one it is known how long it took at least.

        Raises:
            ToolError: DEADLINE_EXCEEDED, nothing is left.
        """
        gauge = self._gauges.get(asked.relay)
        if gauge is None:
            gauge = self._gauges[asked.relay] = TransitGauge()
            if len(self._gauges) > _MAX_RELAYS:
                self._gauges.popitem(last=False)
        self._gauges.move_to_end(asked.relay)
        gauge.renew(asked.sent_at_ms)
        delay_ms = max(gauge.delay_ms(asked.sent_at_ms, self._ticks_ms()), least_delay_ms)
        if delay_ms == 0:
            return asked.command  # as most are; a copy takes twice as long as the measuring
        left_ms = asked.command.deadline_ms - delay_ms
        if left_ms <= 0:
            raise ToolError(Failure.DEADLINE_EXCEEDED)
        return asked.command._replace(deadline_ms=left_ms)

    def _refuse(self, respond: Respond, error: ToolError) -> None:
        if len(self._replies) >= MAX_IN_FLIGHT:
            self._count("dropped")  # the deadline tells the relay that has asked
            return
        self._count(error.failure.value.code)
        respond(self._messages.failure(error))

    def _cancelled(self, message: Msg) -> None:
        if not self._link.is_sealed:
            self._cancel(message.data)

    def _cancel(self, data: bytes) -> None:
        try:
            correlation_id = self._messages.read_cancel(data)
        except ClusterMessageError as error:
            self._log.warning("cancellation of another relay dropped", reason=str(error))
            return
        if (answer := self._running.get(correlation_id)) is not None:
            answer.cancel()


async def _drained(subscription: "Subscription") -> None:
    await subscription.drain()  # type: ignore[no-untyped-call]  # the library's own omission
