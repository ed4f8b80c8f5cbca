"""Commands between relays: the ``NodeRouter`` that asks the relay with the session, and what answers.

A node whose session is in this process is reached without NATS. For any other one request goes to the
subject of the node, which the relay that holds its session answers; that there is no such relay is known at
once, and no list of nodes is read for it. That relay has one subscription for each node, in a queue group:
of two relays that believe to hold a node, one is asked. It does not decide who may call: the relay that
asks has decided and recorded that.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from attrs import define, field
from nats.aio.client import Client
from nats.aio.msg import Msg
from structlog.typing import FilteringBoundLogger

from relay.cluster.client import respond_now, subscribe
from relay.cluster.connection import respond
from relay.cluster.messages import (
    MAX_MESSAGE_BYTES,
    AskedCommand,
    ClusterMessageError,
    ClusterMessages,
    cancel_subject,
    command_headers,
    command_subject,
)
from relay.routing.answer import CommandAnswer
from relay.routing.peers import NoResponderError
from relay.routing.port import Command, LocalRouter, NodeRef
from schemas.delivery import TransitGauge
from schemas.errors import Failure, ToolError
from schemas.payloads import CmdAck

if TYPE_CHECKING:
    from nats.aio.subscription import Subscription

CountCommand = Callable[[str], None]
"""Counts a command by its outcome: ``ok``, the code of its failure, ``cancelled``, or ``dropped``."""


class Requests(Protocol):
    """What asks other relays."""

    async def request(
        self, subject: str, payload: bytes, timeout_s: float, headers: dict[str, str] | None = None
    ) -> bytes:
        """Return the answer to ``payload``, which is sent with ``headers``.

        Raises:
            NoResponderError: it was not delivered.
            TimeoutError: there was no answer in time; it may have been delivered.
        """
        ...

    async def publish(self, subject: str, payload: bytes) -> None:
        """Send ``payload`` to all that listen; it is lost if there is no connection."""
        ...


@define(eq=False, repr=False, kw_only=True)
class NatsRouter:
    """Routes to ``local`` the commands for nodes that this process ``holds``, and all others to ``requests``.

    ``relay`` names this process to the others. ``ticks_ms`` is a clock that cannot be set.
    """

    _local: LocalRouter
    _holds: Callable[[str], bool]
    _requests: Requests
    _messages: ClusterMessages
    _fleet: str
    _relay: str
    _ticks_ms: Callable[[], int]
    _count: CountCommand
    _log: FilteringBoundLogger

    async def run(self, command: Command) -> CmdAck:
        if self._holds(command.node_id):
            return await self._local.start(command)
        try:
            answer = await self._asked(command)
        except ToolError as error:
            self._count(error.failure.value.code)
            raise
        except asyncio.CancelledError:
            self._count("cancelled")
            raise
        self._count("ok")
        return answer

    async def _asked(self, command: Command) -> CmdAck:
        asked = AskedCommand(command, self._relay, self._ticks_ms())
        payload = self._messages.command(asked)
        if len(payload) > MAX_MESSAGE_BYTES:
            # Arguments within their schema fit; in any case, nothing was sent.
            raise ToolError(Failure.INTERNAL, "The command does not fit a message.")
        subject, timeout_s = command_subject(self._fleet, command.node_id), command.deadline_ms / 1000
        try:
            data = await self._requests.request(subject, payload, timeout_s, command_headers(command))
            return self._messages.read_answer(data)
        except NoResponderError:
            raise ToolError(Failure.NODE_OFFLINE) from None
        except TimeoutError:
            # The other relay ends the command by the same deadline: there is nothing to cancel.
            raise ToolError(Failure.DEADLINE_EXCEEDED) from None
        except ClusterMessageError as error:
            self._log.warning(
                "answer of another relay dropped",
                node_id=command.node_id,
                correlation_id=command.correlation_id,
                reason=str(error),
            )
            raise ToolError(Failure.INTERNAL, "Another relay gave an answer that is not valid.") from None
        except asyncio.CancelledError:
            await self._cancel(command)
            raise

    async def _cancel(self, command: Command) -> None:
        message = self._messages.cancel(self._relay, command.correlation_id)
        await self._requests.publish(cancel_subject(self._fleet), message)


MAX_IN_FLIGHT = 4096
"""How many commands of other relays run at once. What a node announces bounds it far below that."""

_QUEUE = "owner"
_MAX_RELAYS = 64
_BUSY_RETRY_MS = 100


@define(eq=False, repr=False, kw_only=True)
class CommandOwner:
    """Gives commands to ``router``. ``ticks_ms`` is a clock that cannot be set."""

    _router: LocalRouter
    _messages: ClusterMessages
    _fleet: str
    _ticks_ms: Callable[[], int]
    _count: CountCommand
    _log: FilteringBoundLogger
    _held: set[str] = field(init=False, factory=set)
    _changed: set[str] = field(init=False, factory=set)
    _wake: asyncio.Event = field(init=False, factory=asyncio.Event)
    _running: dict[str, CommandAnswer] = field(init=False, factory=dict)
    _waiting: set[asyncio.Task[None]] = field(init=False, factory=set)
    _gauges: OrderedDict[str, TransitGauge] = field(init=False, factory=OrderedDict)

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
        subscribed: dict[str, Subscription] = {}
        self._changed = set(self._held)
        await subscribe(client, cancel_subject(self._fleet), self._cancelled, self._log)
        while True:
            changed, self._changed = self._changed, set()
            for node_id in (changed & self._held) - subscribed.keys():
                subject = command_subject(self._fleet, node_id)
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
        if waiting := list(self._waiting):
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)

    def _asked(self, message: Msg) -> None:
        try:
            asked = self._accepted(message)
            answer = self._started(asked)
        except ToolError as error:
            self._refuse(message, error)
            return
        correlation_id = asked.command.correlation_id
        self._running[correlation_id] = answer
        answer.at_end(partial(self._ended, message, correlation_id))

    def _accepted(self, message: Msg) -> AskedCommand:
        """Return the command that ``message`` asks for.

        Raises:
            ToolError: it is not run.
        """
        try:
            asked = self._read(message)
        except ClusterMessageError as error:
            self._log.warning("command of another relay dropped", reason=str(error))
            raise ToolError(Failure.INTERNAL) from None
        if len(self._running) + len(self._waiting) >= MAX_IN_FLIGHT:
            raise ToolError(Failure.RATE_LIMITED, retry_after_ms=_BUSY_RETRY_MS)
        if asked.command.correlation_id in self._running:
            # One call makes one command: this one is a copy.
            raise ToolError(Failure.INTERNAL)
        return asked

    def _read(self, message: Msg) -> AskedCommand:
        asked = self._messages.read_command(message.data, message.headers)
        command = asked.command
        if message.subject != command_subject(self._fleet, command.node_id):
            raise ClusterMessageError("a command is for another node than its subject")
        # By its document the tool has four parts, the second of which is the node.
        if command.tool.split(".")[1] != command.node_id:
            raise ClusterMessageError("a command is for another node than its tool")
        return asked

    def _started(self, asked: AskedCommand) -> CommandAnswer:
        """Return what the answer of the node will be.

        Raises:
            ToolError: it is not run.
        """
        try:
            return self._router.start(self._with_budget_left(asked))
        except ToolError:
            raise
        except Exception as error:  # noqa: BLE001 - a bug must fail one command, not the relay
            raise self._failed(asked.command.correlation_id, error) from None

    def _failed(self, correlation_id: str, error: BaseException) -> ToolError:
        self._log.error("command failed", correlation_id=correlation_id, exc_info=error)
        return ToolError(Failure.INTERNAL)

    def _ended(self, message: Msg, correlation_id: str, answer: CommandAnswer) -> None:
        """Send what became of a command, in the turn in which the node's frame was read."""
        self._running.pop(correlation_id, None)
        if answer.cancelled():
            self._count("cancelled")
        elif (error := answer.exception()) is None:
            self._pass_on(message, correlation_id, answer.result())
        elif isinstance(error, ToolError):
            self._refuse(message, error)
        else:
            self._refuse(message, self._failed(correlation_id, error))

    def _pass_on(self, message: Msg, correlation_id: str, ack: CmdAck) -> None:
        """Send the node's answer, unless it is longer in ASCII than a message may be."""
        data = self._messages.ack(ack)
        if len(data) > MAX_MESSAGE_BYTES:
            self._log.warning(
                "answer too large for another relay", correlation_id=correlation_id, size=len(data)
            )
            self._refuse(message, ToolError(Failure.RESULT_INVALID))
        else:
            self._count("ok")
            self._send(message, data)

    def _with_budget_left(self, asked: AskedCommand) -> Command:
        """Return the command with what its way has left of its budget, measured as a node does.

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
        delay_ms = gauge.delay_ms(asked.sent_at_ms, self._ticks_ms())
        if delay_ms == 0:
            return asked.command  # as most are; a copy takes twice as long as the measuring
        left_ms = asked.command.deadline_ms - delay_ms
        if left_ms <= 0:
            raise ToolError(Failure.DEADLINE_EXCEEDED)
        return asked.command._replace(deadline_ms=left_ms)

    def _refuse(self, message: Msg, error: ToolError) -> None:
        if len(self._waiting) >= MAX_IN_FLIGHT:
            self._count("dropped")  # the deadline tells the relay that has asked
            return
        self._count(error.failure.value.code)
        self._send(message, self._messages.failure(error))

    def _send(self, message: Msg, answer: bytes) -> None:
        if not respond_now(message, answer):
            task = asyncio.create_task(respond(message, answer))
            self._waiting.add(task)
            task.add_done_callback(self._waiting.discard)

    def _cancelled(self, message: Msg) -> None:
        try:
            correlation_id = self._messages.read_cancel(message.data)
        except ClusterMessageError as error:
            self._log.warning("cancellation of another relay dropped", reason=str(error))
            return
        if (answer := self._running.get(correlation_id)) is not None:
            answer.cancel()


async def _drained(subscription: "Subscription") -> None:
    await subscription.drain()  # type: ignore[no-untyped-call]  # the library's own omission
