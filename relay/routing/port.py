"""The interfaces by which the packages above the sessions reach nodes, and other relays of the fleet.

The sessions of this process are the first implementation. ``relay.cluster.commands`` is the second: it sends
a command over a network to the relay that holds the node's session. Must not know agents.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Coroutine, Generator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from schemas.error_roots import PeerError
from schemas.errors import Failure, ToolError
from schemas.frames import OneWayType
from schemas.payloads import CmdAck

OnAnswer = Callable[["CommandAnswer"], object]


class CommandAnswer:
    """A node's answer to a command. Cancelling it, or what awaits it, cancels the command on the node.

    What follows it is called in the turn in which it arrives: a future's waiter runs a turn later, which
    costs as much as reading a frame. Holds a future and is not one: one is made for every call, and a task
    takes longer to await another class.
    """

    __slots__ = ("_followers", "_future")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._future: asyncio.Future[CmdAck] = loop.create_future()
        self._followers: list[OnAnswer] = []

    def __await__(self) -> Generator[Any, None, CmdAck]:
        try:
            return (yield from self._future)
        except asyncio.CancelledError:
            self.cancel()
            raise

    def at_end(self, follow: OnAnswer) -> None:
        """Call ``follow`` when this has ended or is cancelled, before what awaits it; at once if it has."""
        self._followers.append(follow)
        if self._future.done():
            self._end()

    def done(self) -> bool:
        return self._future.done()

    def cancelled(self) -> bool:
        return self._future.cancelled()

    def result(self) -> CmdAck:
        return self._future.result()

    def exception(self) -> BaseException | None:
        return self._future.exception()

    def set_result(self, ack: CmdAck) -> None:
        self._future.set_result(ack)
        self._end()

    def set_exception(self, error: BaseException) -> None:
        self._future.set_exception(error)
        self._future.exception()  # retrieved: else asyncio reports it if the caller has gone
        self._end()

    def expire(self) -> None:
        """Fail with DEADLINE_EXCEEDED, unless this is done."""
        if not self._future.done():
            self.set_exception(ToolError(Failure.DEADLINE_EXCEEDED))

    def cancel(self) -> None:
        self._future.cancel()
        self._end()

    def _end(self) -> None:
        followers, self._followers = self._followers, []
        for follow in followers:
            try:
                follow(self)
            except Exception as error:  # noqa: BLE001 - a bug of one must not keep it from the others
                text = "an answer could not be followed"
                self._future.get_loop().call_exception_handler({"message": text, "exception": error})


def answer_of(work: Coroutine[Any, Any, CmdAck]) -> CommandAnswer:
    """Return the answer that ``work`` returns, which runs in a task and is cancelled with the answer."""
    loop = asyncio.get_running_loop()
    answer, task = CommandAnswer(loop), loop.create_task(work)
    answer.at_end(lambda _: task.cancel())

    def take(_: "asyncio.Task[CmdAck]") -> None:
        if answer.done():
            return
        if task.cancelled():
            answer.cancel()
        elif (error := task.exception()) is not None:
            answer.set_exception(error)
        else:
            answer.set_result(task.result())

    task.add_done_callback(take)
    return answer


@dataclass(frozen=True, slots=True)
class Idempotency:
    """The idempotency key of a call, for the relay that keeps the keys of the node's calls.

    Attributes:
        caller: issuer, tenant and subject of the agent that chose the key.
        key: the SHA-256 of the key, hex.
        arguments: the SHA-256 of the arguments in canonical form, hex.
        repeatable: whether the tool is idempotent: it may be sent again while its outcome is not known.
    """

    caller: tuple[str, str, str]
    key: str
    arguments: str
    repeatable: bool


class Command(NamedTuple):
    """One command to a node.

    Attributes:
        tool: the canonical name.
        deadline_ms: the budget from now.
        correlation_id: the ULID, in upper case, of the call that this command is for, and of no other.
        cost: how much it counts towards the rate of its capability.
        idempotency: None if the call has no idempotency key.
        caller: the digest of the agent whose call it is; None if that is not known.
    """

    node_id: str
    tool: str
    arguments: Mapping[str, Any]
    deadline_ms: int
    correlation_id: str
    traceparent: str | None = None
    cost: float = 1.0
    idempotency: Idempotency | None = None
    caller: str | None = None


class NodeRouter(Protocol):
    """Sends commands to nodes."""

    async def run(self, command: Command) -> CmdAck:
        """Return the payload of the node's ``cmd_ack``.

        Cancelling cancels the command on the node.

        Raises:
            ToolError: NODE_OFFLINE or RATE_LIMITED, then it was never sent; DEADLINE_EXCEEDED, then it may
                have run.
        """
        ...


class LocalRouter(ABC):
    """A ``NodeRouter`` of this process's own nodes, which need not be awaited."""

    @abstractmethod
    def start(self, command: Command) -> CommandAnswer:
        """Send ``command`` and return what its answer will be.

        Raises:
            ToolError: it was not sent; other errors are the answer's.
        """

    async def run(self, command: Command) -> CmdAck:
        """Send ``command`` and return the node's answer, as ``NodeRouter`` describes."""
        return await self.start(command)


@dataclass(frozen=True, slots=True)
class NodeRef:
    """A node by the session that it has: of two references that differ in it, the later one is current."""

    tenant: str
    node_id: str
    session_id: str


FrameHandler = Callable[[NodeRef, Any], None]
"""Handles the payload of a frame, which has the type in ``payloads`` named for it. Must not block."""
ConnectionHandler = Callable[[NodeRef, bool], None]
"""Is called with True when a node has connected, and with False when its connection is lost."""
AnnounceHandler = Callable[[NodeRef], None]
"""Is called when a manifest of a connected node was accepted over its session."""


class NodeFrames(Protocol):
    """Sends one-way frames to nodes, and hands over those that nodes send."""

    def send(self, node_id: str, frame_type: OneWayType, payload: Mapping[str, Any]) -> None:
        """Queue a frame for the node. It is lost with the connection: nothing is sent again.

        Raises:
            ToolError: NODE_OFFLINE if there is no connection; RATE_LIMITED if the node does not read, or the
                frame exceeds the rate of its type; INTERNAL if it is larger than its type allows.
        """
        ...

    def on_frame(self, frame_type: OneWayType, handler: FrameHandler) -> None:
        """Call ``handler`` with every frame of that type.

        Raises:
            ValueError: the type has a handler.
        """
        ...

    def on_connection(self, handler: ConnectionHandler) -> None:
        """Call ``handler`` whenever a node connects, a resumed session included, and when it is lost.

        A node that reconnects before its loss was noticed is connected twice in a row.
        """
        ...

    def on_announce(self, handler: AnnounceHandler) -> None:
        """Call ``handler`` whenever a manifest was accepted over a session, after it was acknowledged."""
        ...


class Asker(NamedTuple):
    """The relay that asks, and the token of the agent that it asks for.

    Attributes:
        token: empty if it asks for none; None while the fleet is not sealed, where a relay's word counts.
    """

    relay: str
    token: str | None


PeerHandler = Callable[[Asker, Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
"""Answers a body that fits the document of its kind. It may raise ToolError."""


class NoResponderError(PeerError):
    """No relay answers a subject, or there is no connection: the request was never delivered."""


class Peers(Protocol):
    """The other relays of the fleet, each by the id of its process: a ULID, in upper case.

    Attributes:
        relay: this relay's own.
    """

    relay: str

    def running(self) -> Collection[str]:
        """Return the other relays that run, as far as is known."""
        ...

    def relay_of(self, node_id: str) -> str | None:
        """Return the relay that a node is connected to, this one included; None if to none that is known."""
        ...

    def answer(self, kind: str, handler: PeerHandler) -> None:
        """Answer by ``handler`` what others ask of that kind.

        Raises:
            ValueError: the kind has a handler.
        """
        ...

    async def ask(
        self, relay: str, kind: str, body: Mapping[str, Any], timeout_s: float, token: str = ""
    ) -> Mapping[str, Any]:
        """Return what ``relay`` answers, for the agent with ``token``, which goes only sealed.

        Cancelling cancels it there.

        Raises:
            NoResponderError: it was not delivered: there is no such relay, or no connection.
            TimeoutError: no answer in time; it may have been delivered.
            ToolError: as the handler there has raised it, without its text; INTERNAL, if it was no answer;
                ARGUMENTS_INVALID, if ``body`` is too large to be sent.
        """
        ...
