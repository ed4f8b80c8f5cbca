"""Runs commands: each at most once, within its deadline, and only what this node has announced.

The node trusts the relay to have decided who may call; it still checks name and arguments itself, because
it is the node that acts. Must not know the connection: answers go to a callback, and are kept for a
repeated command.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from structlog.typing import FilteringBoundLogger

from kubelet.ceiling import OutsideCeilingError
from kubelet.handlers.base import Handler, ToolFault
from kubelet.handlers.verbs import HandlerVerb, commands_per_s, verbs_of
from kubelet.process import ticks_ms
from schemas.delivery import DEFAULT_HANDLER_MS, AnswerCache, CommandStatus, commands_to_know
from schemas.errors import Failure, ToolError
from schemas.faults import OncePerPlace
from schemas.frames import Frame
from schemas.kinds import KindRegistry
from schemas.payloads import Cmd, CmdAck, CmdRefused
from schemas.projection import ToolName
from schemas.registry import SchemaRegistry
from schemas.session import ProtocolError
from schemas.spans import Span, SpanSink, no_spans
from schemas.text import printable

Reply = Callable[[str, CmdAck], Awaitable[None]]
"""Sends the payload of a ``cmd_ack`` in answer to a ``msg_id``, if there is a connection."""

_BUSY_RETRY_MS = 100
_DRAINING_RETRY_MS = 1000
_ANSWER_S = 1.0
_LOGGED_EVERY_S = 1.0
DRAIN_S = 6.0
"""How long the commands that run may take at the end: longer than any call through a relay."""
_REFUSED_HERE = frozenset(
    {Failure.NAME_UNKNOWN, Failure.ARGUMENTS_INVALID, Failure.RATE_LIMITED, Failure.OUTSIDE_CEILING}
)


class NodeTool(NamedTuple):
    """One verb of one capability. ``longest_ms`` is how long a command may take.

    ``slots`` are those of its capability, one for each command that may run at once.
    """

    verb: HandlerVerb
    alias: str
    longest_ms: int
    slots: asyncio.Semaphore


class Dispatcher:
    """Runs the commands of one node. ``ticks_ms`` only ever go forward.

    Attributes:
        tools: by canonical name.
        commands_per_s: how many commands a relay that keeps to the limits in the manifest sends at most.
        outcomes: how many commands ended so: by code, ok if it succeeded, and by the hop that failed:
            ``session``, its time was spent on the way; ``node``, refused here; ``handler``.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - what comes in from outside
        self,
        node_id: str,
        handlers: Sequence[Handler],
        kinds: KindRegistry,
        registry: SchemaRegistry,
        log: FilteringBoundLogger,
        ticks_ms: Callable[[], int] = ticks_ms,
        spans: SpanSink = no_spans,
    ) -> None:
        self.tools: dict[str, NodeTool] = {}
        for handler in handlers:
            cap_id, constraints = handler.capability["cap_id"], handler.capability["constraints"]
            longest_ms = constraints.get("deadline_ms_default", DEFAULT_HANDLER_MS)
            slots = asyncio.Semaphore(constraints.get("max_concurrency", 1))
            for each in verbs_of(handler, kinds, registry, log):
                name = ToolName(each.kind.short, node_id, cap_id, each.verb.name)
                self.tools[name.canonical] = NodeTool(each, name.alias, longest_ms, slots)
        self.commands_per_s = commands_per_s(handlers)
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self._memory = AnswerCache(commands_to_know(self.commands_per_s))
        self._running: dict[str, asyncio.Task[None]] = {}
        self._deadlines: set[asyncio.Timeout] = set()
        self._is_draining = False
        self._logged = OncePerPlace(_LOGGED_EVERY_S)
        self._log = log
        self._spans = spans
        self._ticks_ms = ticks_ms

    @property
    def inflight(self) -> int:
        return len(self._running)

    def begin(self, frame: Frame, budget_ms: int, reply: Reply) -> CommandStatus:
        """Run the command in ``frame`` if it is new, and return which it is.

        ``budget_ms`` is what is left for the answer. The handler has it too, but no more than it announced.
        """
        msg_id, now = frame.msg_id, self._ticks_ms()
        # Without what the way has taken: the relay's own deadline can only be earlier.
        status = self._memory.admit(msg_id, now + frame.payload["deadline_ms"], now)
        if status is CommandStatus.NEW:
            task = asyncio.create_task(self._run(frame, budget_ms, reply))
            self._running[msg_id] = task
            task.add_done_callback(partial(self._ended, frame))
        return status

    async def submit(self, frame: Frame, budget_ms: int, reply: Reply) -> None:
        """Run the command in ``frame`` as ``begin`` does, or answer again if it was seen before."""
        match self.begin(frame, budget_ms, reply):
            case CommandStatus.SEEN:
                if (answer := self._memory.recall(frame.msg_id)) is not None:
                    await reply(frame.msg_id, answer)
            case CommandStatus.FORGOTTEN:
                gone = ToolError(Failure.DEADLINE_EXCEEDED, "It ran before; its answer is not kept any more.")
                await self._refuse(frame, gone, reply)
            case CommandStatus.FULL:
                full = ToolError(Failure.RATE_LIMITED, retry_after_ms=_BUSY_RETRY_MS)
                await self._refuse(frame, full, reply)

    async def _refuse(self, frame: Frame, error: ToolError, reply: Reply) -> None:
        self.outcomes[error.failure.value.code, "node"] += 1
        await reply(frame.msg_id, _refusal(error, frame.payload["correlation_id"]))

    def cancel(self, msg_id: str) -> None:
        """Stop the command ``msg_id``: its caller waits no longer."""
        if (task := self._running.get(msg_id)) is not None:
            task.cancel()

    async def drain(self, timeout_s: float = DRAIN_S) -> None:
        """Refuse new commands, and wait for those that run, which have ``timeout_s`` left at most."""
        self._is_draining = True
        latest = asyncio.get_running_loop().time() + timeout_s
        for deadline in self._deadlines:
            if not deadline.expired():
                deadline.reschedule(min(deadline.when() or latest, latest))
        if running := list(self._running.values()):
            await asyncio.wait(running, timeout=timeout_s + _ANSWER_S)

    async def close(self) -> None:
        if tasks := list(self._running.values()):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _run(self, frame: Frame, budget_ms: int, reply: Reply) -> None:
        correlation_id = frame.payload["correlation_id"]
        traceparent = frame.payload.get("traceparent")
        began_ms, failed = self._ticks_ms(), None
        try:
            result = await self._invoke(frame.payload, budget_ms)
            answer: CmdAck = {"ok": True, "result": result}
            self.outcomes["ok", ""] += 1
            if traceparent is not None:
                # Only commands that are traced: a line for each would be most of what a command costs.
                self._log.info("command done", correlation_id=correlation_id, traceparent=traceparent)
        except ToolError as error:
            code = failed = error.failure.value.code
            self.outcomes[code, _hop_of(error, budget_ms)] += 1
            # A relay may send more commands than a board's log holds lines.
            kept_back = self._logged.suppressed_before(code, self._ticks_ms() / 1000)
            if kept_back is not None:
                facts = {"correlation_id": correlation_id, "traceparent": traceparent}
                self._log.info("command refused", code=code, kept_back=kept_back, **facts)
            answer = _refusal(error, correlation_id)
        if traceparent is not None:
            self._spans(_span_of(frame.payload, self._ticks_ms() - began_ms, failed))
        try:
            self._memory.remember(frame.msg_id, answer)
            await reply(frame.msg_id, answer)
        except (ProtocolError, TypeError, ValueError) as error:
            # Larger than a frame, or not JSON: that is the handler's fault, and costs its caller an error.
            self._log.error("answer cannot be sent", correlation_id=correlation_id, exc_info=error)
            answer = _refusal(ToolError(Failure.INTERNAL), correlation_id)
            self._memory.remember(frame.msg_id, answer)
            await reply(frame.msg_id, answer)

    def _ended(self, frame: Frame, task: asyncio.Task[None]) -> None:
        del self._running[frame.msg_id]
        if task.cancelled() and self._memory.runs(frame.msg_id):
            # Its caller waits no longer, but may send it again: it must not run a second time. Recorded here,
            # because a task that is cancelled before its first step never reaches an except of its own.
            refusal = _refusal(ToolError(Failure.DEADLINE_EXCEEDED), frame.payload["correlation_id"])
            self._memory.remember(frame.msg_id, refusal)

    async def _invoke(self, command: Cmd, budget_ms: int) -> dict[str, Any]:
        tool = self.tools.get(command["tool"])
        if tool is None:
            raise ToolError(Failure.NAME_UNKNOWN)
        arguments = command["arguments"]
        if not tool.verb.accepts(arguments):
            raise ToolError(Failure.ARGUMENTS_INVALID)
        if budget_ms <= 0:
            raise ToolError(
                Failure.DEADLINE_EXCEEDED, "The time was spent on the way; the command was not run."
            )
        if self._is_draining:
            raise ToolError(Failure.RATE_LIMITED, "The node is stopping.", retry_after_ms=_DRAINING_RETRY_MS)
        if tool.slots.locked():
            raise ToolError(Failure.RATE_LIMITED, retry_after_ms=_BUSY_RETRY_MS)
        deadline = asyncio.timeout(min(budget_ms, tool.longest_ms) / 1000)
        self._deadlines.add(deadline)
        try:
            async with tool.slots, deadline:
                return await tool.verb.invoke(
                    arguments, tool=command["tool"], correlation_id=command["correlation_id"]
                )
        except ToolError:
            raise
        except Exception as error:
            if deadline.expired() and isinstance(error, TimeoutError):
                raise ToolError(Failure.DEADLINE_EXCEEDED) from None
            if (stated := self._stated(error, tool, command)) is not None:
                raise stated from None
            # One broken handler must cost its caller an error, not the node its daemon.
            self._log.error(
                "handler failed",
                tool=command["tool"],
                correlation_id=command["correlation_id"],
                exc_info=error,
            )
            raise ToolError(Failure.INTERNAL) from error
        finally:
            self._deadlines.discard(deadline)

    def _stated(self, error: Exception, tool: NodeTool, command: Cmd) -> ToolError | None:
        """Return what an agent reads where ``error`` is a reason that the handler states; else None."""
        correlation_id = command["correlation_id"]
        if isinstance(error, OutsideCeilingError):
            # Without what was asked for: the log has other readers than the board's owner.
            rule = printable(error.rule)
            self._log.info("outside the ceiling", kind=error.kind, rule=rule, correlation_id=correlation_id)
            return ToolError(Failure.OUTSIDE_CEILING)
        if isinstance(error, ToolFault) and (fault := tool.verb.kind.faults.get(error.code)) is not None:
            self._log.info(
                "tool fault",
                tool=command["tool"],
                fault=error.code,
                detail=printable(error.detail),
                correlation_id=correlation_id,
            )
            return ToolError.of_fault(error.code, fault)
        return None


def _span_of(command: Cmd, duration_ms: int, failed: str | None) -> Span:
    """Return the span of a traced command, below the relay's."""
    _version, trace_id, parent_id, _flags = command["traceparent"].split("-")
    attributes = {"edge.tool": command["tool"], "edge.correlation_id": command["correlation_id"]}
    return Span("edge.command", trace_id, duration_ms / 1000, attributes, parent_id=parent_id, error=failed)


def _hop_of(error: ToolError, budget_ms: int) -> str:
    if error.failure is Failure.DEADLINE_EXCEEDED and budget_ms <= 0:
        return "session"
    return "node" if error.failure in _REFUSED_HERE else "handler"


def _refusal(error: ToolError, correlation_id: str) -> CmdAck:
    refused: CmdRefused = {"ok": False, "error": error.envelope(correlation_id)}
    if error.failure is Failure.OUTSIDE_CEILING:
        refused["denied_by"] = "owner"
    return refused
