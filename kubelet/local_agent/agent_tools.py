"""What a call of the local agent ends with: of the node's own tools, of lent tools, and of the messages.

Arguments are validated here, before anything leaves this process. Must not know MCP, nor the socket.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from structlog.typing import FilteringBoundLogger

from kubelet.dispatch import Dispatcher
from kubelet.handlers.base import Handler, work_in_background
from kubelet.local_agent.daemon_client import ResponseError
from kubelet.local_agent.toolbox import LentSchema, Toolbox
from schemas.errors import Failure, ToolError
from schemas.frames import Frame
from schemas.images import Images, NoImageError, apart
from schemas.kinds import KindRegistry
from schemas.payloads import CmdAck
from schemas.projection import parse
from schemas.registry import SchemaRegistry, listed_schema
from schemas.text import printable_values
from schemas.ulids import UlidSource

MAX_UNREAD = 64
MAX_WAIT_MS = 30_000
READ, REPLY = "caller-messages", "caller-reply"

ENTRIES: Mapping[str, dict[str, Any]] = {
    READ: {
        "name": READ,
        "title": "Messages of the caller",
        "description": (
            "Read the messages that the agent which opened a session with this node has sent, oldest first; "
            "each is returned once. With wait_ms, wait that long for the first one."
        ),
        "inputSchema": {
            "type": "object",
            "properties": {"wait_ms": {"type": "integer", "minimum": 0, "maximum": MAX_WAIT_MS}},
            "additionalProperties": False,
        },
        "annotations": {"readOnlyHint": True, "openWorldHint": True},
    },
    REPLY: {
        "name": REPLY,
        "title": "Reply to the caller",
        "description": "Send a message to the agent that opened a session with this node.",
        "inputSchema": {
            "type": "object",
            "properties": {"message": {"type": "string", "maxLength": 196_608}},
            "required": ["message"],
            "additionalProperties": False,
        },
        "annotations": {"readOnlyHint": False, "destructiveHint": False, "openWorldHint": True},
    },
}


class Mailbox:
    """The messages that were not read yet; of too many, the newest.

    Attributes:
        session_id: the session of those that were read last; empty before.
    """

    def __init__(self) -> None:
        self.session_id = ""
        self._unread: deque[tuple[str, str]] = deque(maxlen=MAX_UNREAD)
        self._arrived = asyncio.Event()

    def put(self, session_id: str, message: str) -> None:
        self._unread.append((session_id, message))
        self._arrived.set()

    async def take(self, wait_ms: int) -> list[str]:
        """Return all messages of one session, the oldest one's; wait ``wait_ms`` for one if there is none."""
        if not self._unread:
            self._arrived.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_ms / 1000):
                    await self._arrived.wait()
        messages = list[str]()
        while self._unread and (not messages or self._unread[0][0] == self.session_id):
            self.session_id, message = self._unread.popleft()
            messages.append(message)
        return messages


class OwnTools:
    """The tools of ``handlers``, by the dashed names under which a relay lists them too.

    They are run in this process, by the dispatcher that the daemon has: neither it nor the relay takes part.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - what comes in from outside
        self,
        node_id: str,
        handlers: Sequence[Handler],
        registry: SchemaRegistry,
        kinds: KindRegistry,
        ulids: UlidSource,
        now_ms: Callable[[], int],
        log: FilteringBoundLogger,
    ) -> None:
        self._handlers = handlers
        self._ulids = ulids
        self._now_ms = now_ms
        self._log = log
        self._dispatcher = Dispatcher(node_id, handlers, kinds, registry, log)
        self._tasks: list[asyncio.Task[None]] = []
        # What follows the first sample of a stream is sent by a relay.
        tools = self._dispatcher.tools.items()
        self._tools = {canonical: tool for canonical, tool in tools if not tool.verb.verb.streams}
        self.entries: dict[str, Mapping[str, Any]] = {}
        for tool in self._tools.values():
            kind, verb = tool.verb.kind, tool.verb.verb
            self.entries[tool.alias] = {
                "name": tool.alias,
                "title": verb.title,
                "description": verb.description,
                "inputSchema": listed_schema(registry, verb.input_ref),
                "outputSchema": listed_schema(registry, verb.output_ref),
                "annotations": {
                    "readOnlyHint": kind.safety_class == "read_only",
                    "idempotentHint": verb.idempotent,
                    "openWorldHint": False,
                },
            }

    def start(self) -> None:
        self._tasks = [asyncio.create_task(work_in_background(each, self._log)) for each in self._handlers]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._dispatcher.close()

    def canonical(self, name: str) -> str | None:
        """Return the canonical name of a tool of this node, given either form."""
        parsed = parse(name)
        return parsed.canonical if parsed and parsed.canonical in self._tools else None

    async def call(self, canonical: str, arguments: Mapping[str, Any], correlation_id: str) -> CmdAck:
        """Return the payload of a ``cmd_ack``: a result, or an error envelope."""
        answer: asyncio.Future[CmdAck] = asyncio.get_running_loop().create_future()

        async def reply(_msg_id: str, payload: CmdAck) -> None:
            if not answer.done():
                answer.set_result(payload)

        deadline_ms = self._tools[canonical].longest_ms
        payload = {
            "tool": canonical,
            "arguments": arguments,
            "deadline_ms": deadline_ms,
            "sent_at_ms": self._now_ms(),
            "correlation_id": correlation_id,
        }
        frame = Frame("cmd", self._ulids.new(), payload)
        try:
            await self._dispatcher.submit(frame, deadline_ms, reply)
            ended = await answer
            if not ended["ok"]:
                return ended
            # Every text printable: the dispatcher has escaped those of third parties.
            return {**ended, "result": printable_values(ended["result"])}
        except asyncio.CancelledError:
            self._dispatcher.cancel(frame.msg_id)
            raise

    def apart(self, canonical: str, result: Mapping[str, Any]) -> tuple[Mapping[str, Any], Images]:
        """Return the ``result`` of a tool without its images, and these as content blocks of MCP.

        Raises:
            ToolError: one is no image of its type.
        """
        try:
            return apart(result, self._tools[canonical].verb.verb.images)
        except NoImageError as error:
            raise ToolError(Failure.RESULT_INVALID) from error


Request = Callable[[str, Mapping[str, Any]], Awaitable[Any]]
"""Returns what the daemon answers to a method with params, or raises a ToolError."""


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """What a call ended with: a ``value`` and images, or an ``error`` and perhaps the caller's own text."""

    value: Any = None
    error: Mapping[str, Any] | None = None
    caller_text: str | None = None
    images: Images = ()


class AgentTools:
    """The calls of one local agent. ``make_own`` makes the node's own tools, given the node's id."""

    def __init__(
        self, toolbox: Toolbox, make_own: Callable[[str], OwnTools], correlation_id: Callable[[], str]
    ) -> None:
        self._toolbox = toolbox
        self._make_own = make_own
        self._correlation_id = correlation_id
        self._mailbox = Mailbox()
        self._own: OwnTools | None = None
        self._schemas = {name: LentSchema(entry["inputSchema"]) for name, entry in ENTRIES.items()}
        toolbox.set_own(ENTRIES)

    def node_known(self, node_id: str) -> None:
        """Serve the node's own tools from now on."""
        if self._own is None:
            self._own = self._make_own(node_id)
            self._own.start()
            self._toolbox.set_own({**ENTRIES, **self._own.entries})

    def lend(self, caller_id: str, tools: list[Mapping[str, Any]]) -> None:
        self._toolbox.lend(caller_id, tools)

    def withdraw(self) -> None:
        self._toolbox.withdraw()

    def message(self, session_id: str, message: str) -> None:
        self._mailbox.put(session_id, message)

    async def close(self) -> None:
        if self._own is not None:
            await self._own.close()

    async def call(self, request: Request, name: str, arguments: Mapping[str, Any]) -> ToolAnswer:
        """Return what a call ends with; a failure is an answer too."""
        correlation_id = self._correlation_id()
        try:
            if self._own is not None and (canonical := self._own.canonical(name)) is not None:
                answer = await self._own.call(canonical, arguments, correlation_id)
                if not answer["ok"]:
                    return ToolAnswer(error=answer["error"])
                value, images = self._own.apart(canonical, answer["result"])
                return ToolAnswer(value, images=images)
            return ToolAnswer(await self._requested(request, name, arguments))
        except ResponseError as error:
            envelope = error.sent or ToolError(Failure.INTERNAL).envelope()
            return ToolAnswer(
                error={**envelope, "correlation_id": correlation_id}, caller_text=error.caller_text
            )
        except ToolError as error:
            return ToolAnswer(error=error.envelope(correlation_id))

    async def _requested(self, request: Request, name: str, arguments: Mapping[str, Any]) -> Any:
        if (lent := self._toolbox.lent(name)) is not None:
            lent.schema.check(arguments)
            # With its caller_id: the request must not reach another caller that has followed meanwhile.
            params = {"caller_id": lent.caller_id, "tool": lent.name, "arguments": arguments}
            return await request("caller_tool", params)
        if (schema := self._schemas.get(name)) is None:
            raise ToolError(Failure.NAME_UNKNOWN)
        schema.check(arguments)
        if name == READ:
            return {"messages": await self._mailbox.take(arguments.get("wait_ms", 0))}
        return await self._replied(request, arguments)

    async def _replied(self, request: Request, arguments: Mapping[str, Any]) -> Any:
        """Reply to the caller whose messages were read last, if any were: another may have followed it."""
        if not (session_id := self._mailbox.session_id):
            return await request("session_reply", arguments)
        try:
            return await request("session_reply", {**arguments, "session_id": session_id})
        except ResponseError as error:
            if error.sent.get("code") == Failure.SESSION_UNKNOWN.value.code:
                self._mailbox.session_id = ""  # refused once: what the agent sends now is for the next caller
            raise
