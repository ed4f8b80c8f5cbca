"""The ``NodeRouter`` of a fleet of several relays: asks the relay that holds the node's session, over NATS.

A node whose session is in this process is reached without NATS. For any other one request goes to the subject
of the node, which the relay that holds its session answers; that there is no such relay is known at once, and
no list of nodes is read for it. Must not import the library of NATS: the connection does.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from structlog.typing import FilteringBoundLogger

from relay.routing.cluster_messages import (
    MAX_MESSAGE_BYTES,
    AskedCommand,
    ClusterMessageError,
    ClusterMessages,
    cancel_subject,
    command_headers,
    command_subject,
)
from relay.routing.port import Command, LocalRouter, NoResponderError
from schemas.errors import Failure, ToolError
from schemas.payloads import CmdAck

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


class NatsRouter:
    """Routes to ``local`` the commands for nodes that this process ``holds``, and all others to ``requests``.

    ``relay`` names this process to the others. ``ticks_ms`` is a clock that cannot be set.
    """

    def __init__(  # noqa: PLR0913 - what comes in from outside
        self,
        *,
        local: LocalRouter,
        holds: Callable[[str], bool],
        requests: Requests,
        messages: ClusterMessages,
        fleet: str,
        relay: str,
        ticks_ms: Callable[[], int],
        count: CountCommand,
        log: FilteringBoundLogger,
    ) -> None:
        self._local = local
        self._holds = holds
        self._requests = requests
        self._messages = messages
        self._fleet = fleet
        self._relay = relay
        self._ticks_ms = ticks_ms
        self._count = count
        self._log = log

    async def run(self, command: Command) -> CmdAck:
        """Send ``command`` and return the node's answer, as ``NodeRouter`` describes."""
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
