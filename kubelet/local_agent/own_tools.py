"""The node's own tools, served in this process: neither the relay nor the daemon takes part.

Must not do by itself what the daemon's dispatcher does: it is the same one.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from structlog.typing import FilteringBoundLogger

from kubelet.dispatch import Dispatcher
from kubelet.handlers.base import Handler
from schemas.delivery import DEFAULT_HANDLER_MS
from schemas.frames import Frame
from schemas.kinds import KindRegistry, Verb
from schemas.listed_schemas import listed_schema
from schemas.payloads import CmdAck
from schemas.projection import ToolName, parse
from schemas.registry import SchemaRegistry
from schemas.text import changed_at, printable_values
from schemas.ulids import UlidSource


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
        self._tools: dict[str, tuple[Verb, int]] = {}
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
                self._tools[name.canonical] = (verb, deadline_ms)
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

        verb, deadline_ms = self._tools[canonical]
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
            return _shown(verb, await answer)
        except asyncio.CancelledError:
            self._dispatcher.cancel(frame.msg_id)
            raise


def _shown(verb: Verb, answer: CmdAck) -> CmdAck:
    """Return ``answer`` with the texts in it that a third party may have chosen as a relay shows them too."""
    if not answer["ok"]:
        return answer
    result = answer["result"]
    for foreign in verb.foreign_texts:
        result = changed_at(result, foreign.path, foreign.shown)
    return {**answer, "result": printable_values(result)}
