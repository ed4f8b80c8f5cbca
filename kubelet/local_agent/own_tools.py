"""The node's own tools, served in this process: neither the relay nor the daemon takes part.

Must not do by itself what the daemon's dispatcher does: it is the same one.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from structlog.typing import FilteringBoundLogger

from kubelet.dispatch import Dispatcher
from kubelet.handlers.base import Handler
from schemas.delivery import DEFAULT_HANDLER_MS
from schemas.errors import Failure, ToolError
from schemas.frames import Frame
from schemas.images import ImageMember, Images, NoImageError, apart
from schemas.kinds import KindRegistry
from schemas.payloads import CmdAck
from schemas.projection import ToolName, parse
from schemas.registry import SchemaRegistry, listed_schema
from schemas.text import printable_values
from schemas.ulids import UlidSource


class _OwnTool(NamedTuple):
    deadline_ms: int
    images: tuple[ImageMember, ...]


class OwnTools:
    """The tools of ``handlers``, by the dashed names under which a relay lists them too."""

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
        self._dispatcher = Dispatcher(node_id, handlers, kinds, registry, log)
        self._tasks: list[asyncio.Task[None]] = []
        self._tools: dict[str, _OwnTool] = {}
        self.entries: dict[str, Mapping[str, Any]] = {}
        for handler in handlers:
            capability = handler.capability
            kind = kinds.get(capability["kind"])
            if kind is None:
                raise ValueError(f"{capability['kind']} is not a registered kind")
            for verb in map(kind.verbs.__getitem__, capability["verbs"]):
                if verb.streams:
                    continue  # what follows its first sample is sent by a relay
                name = ToolName(kind.short, node_id, capability["cap_id"], verb.name)
                deadline_ms = capability["constraints"].get("deadline_ms_default", DEFAULT_HANDLER_MS)
                self._tools[name.canonical] = _OwnTool(deadline_ms, verb.images)
                self.entries[name.alias] = {
                    "name": name.alias,
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
        """Begin what the handlers do between calls."""
        self._tasks = [asyncio.create_task(handler.run()) for handler in self._handlers]

    async def close(self) -> None:
        """End it, and the calls that run."""
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

        deadline_ms = self._tools[canonical].deadline_ms
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
            return _shown(await answer)
        except asyncio.CancelledError:
            self._dispatcher.cancel(frame.msg_id)
            raise

    def apart(self, canonical: str, result: Mapping[str, Any]) -> tuple[Mapping[str, Any], Images]:
        """Return the ``result`` of a tool without its images, and these as content blocks of MCP.

        Raises:
            ToolError: one is no image of its type.
        """
        try:
            return apart(result, self._tools[canonical].images)
        except NoImageError as error:
            raise ToolError(Failure.RESULT_INVALID) from error


def _shown(answer: CmdAck) -> CmdAck:
    """Return ``answer`` with every text printable: the dispatcher has escaped those of third parties."""
    if not answer["ok"]:
        return answer
    return {**answer, "result": printable_values(answer["result"])}
