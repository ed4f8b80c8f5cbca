"""Answers the commands of other relays for the nodes whose sessions this relay holds.

One subscription for each node, in a queue group: of two relays that believe to hold a node, one is asked.
Must not decide who may call: the relay that asks has decided and recorded that.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from nats.aio.client import Client
from nats.aio.msg import Msg
from structlog.typing import FilteringBoundLogger

from relay.cluster.connection import respond
from relay.cluster.direct_client import respond_now
from relay.cluster.direct_subscription import subscribe
from relay.routing.cluster_messages import (
    MAX_MESSAGE_BYTES,
    AskedCommand,
    ClusterMessageError,
    ClusterMessages,
    cancel_subject,
    command_subject,
)
from relay.routing.nats import CountCommand
from relay.routing.port import Command, CommandAnswer, LocalRouter, NodeRef
from schemas.delivery import TransitGauge
from schemas.errors import Failure, ToolError
from schemas.payloads import CmdAck

if TYPE_CHECKING:
    from nats.aio.subscription import Subscription

MAX_IN_FLIGHT = 4096
"""How many commands of other relays run at once. What a node announces bounds it far below that."""

_QUEUE = "owner"
_MAX_RELAYS = 64
_BUSY_RETRY_MS = 100


class CommandOwner:
    """Gives commands to ``router``. ``ticks_ms`` is a clock that cannot be set."""

    def __init__(  # noqa: PLR0913 - what comes in from outside
        self,
        *,
        router: LocalRouter,
        messages: ClusterMessages,
        fleet: str,
        ticks_ms: Callable[[], int],
        count: CountCommand,
        log: FilteringBoundLogger,
    ) -> None:
        self._router = router
        self._messages = messages
        self._fleet = fleet
        self._ticks_ms = ticks_ms
        self._count = count
        self._log = log
        self._held: set[str] = set()
        self._changed: set[str] = set()
        self._wake = asyncio.Event()
        self._running: dict[str, CommandAnswer] = {}
        self._waiting: set[asyncio.Task[None]] = set()
        self._gauges: OrderedDict[str, TransitGauge] = OrderedDict()

    def holds(self, node_id: str) -> bool:
        """Return whether this process has a connection to the node."""
        return node_id in self._held

    def connection_changed(self, node: NodeRef, connected: bool) -> None:  # noqa: FBT001 - a ConnectionHandler
        """Take in that a node has connected to this process, or is lost."""
        if connected:
            self._held.add(node.node_id)
        else:
            self._held.discard(node.node_id)
        self._changed.add(node.node_id)
        self._wake.set()

    async def serve(self, client: Client) -> None:
        """Answer on ``client`` until cancelled."""
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
