"""Canaries: echoes that the relay sends to nodes by itself, to know that calls flow before an agent asks.

One after each welcome, when the node's manifest is accepted, and ten a minute to connected nodes in turn, the
tenants alternating. Half of those go to nodes that are known as silent, if there are any: a further failure
of one says nothing of the relay, while another node answers. Each passes the executor as an agent's call
does; the principal is the relay. The audit has one line a minute for all of them, which is written before the
first that it allows, and sums up those since the line before. They use up nothing of the rate that a
capability announces. Must not end a session: a node that does not answer is counted and logged.
"""

import asyncio
import math
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress

from attrs import define, field
from structlog.typing import FilteringBoundLogger

from relay.audit.log import CANARIES_EVENT, AuditUnavailableError
from relay.audit.writer import AuditWriter
from relay.auth.agent_tokens import Principal
from relay.calls.envelope import Call
from relay.calls.executor import CallExecutor, CallRecord
from relay.calls.results import Hop
from relay.fleet.fleet import Fleet
from relay.fleet.tools import Tool
from relay.observability.metrics import Metrics
from relay.routing.port import NodeRef
from schemas.errors import Failure, ToolError
from schemas.health import Health, Loop
from schemas.ulids import UlidSource

INTERVAL_S = 6.0
WINDOW_S = 60.0
_FEWEST = 3
"""Calls no longer flow when so many echoes have failed and none succeeded: one node may just be slow."""
_AT_ONCE = 32
"""Of those after a welcome, when thousands of nodes reconnect."""
_ROUND_S = 60.0
_LINE_S = 60.0
_ECHO_KIND = "system.echo"
_MESSAGE = "canary"
_NOT_A_FAILURE = frozenset({Failure.RATE_LIMITED})
"""As many agents call at once as the capability allows: their calls are the sample."""


@define(eq=False, repr=False)
class _Turns:
    """Nodes, in turn, the tenants alternating."""

    _tenants: OrderedDict[str, OrderedDict[str, None]] = field(init=False, factory=OrderedDict)

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def add(self, tenant: str, node_id: str) -> None:
        self._tenants.setdefault(tenant, OrderedDict())[node_id] = None

    def discard(self, tenant: str, node_id: str) -> None:
        nodes = self._tenants.get(tenant, OrderedDict())
        nodes.pop(node_id, None)
        if not nodes:
            self._tenants.pop(tenant, None)

    def next(self) -> tuple[str, str]:
        """Return the tenant whose turn it is, and its node whose turn it is; there must be one."""
        tenant, nodes = next(iter(self._tenants.items()))
        self._tenants.move_to_end(tenant)
        node_id = next(iter(nodes))
        nodes.move_to_end(node_id)
        return tenant, node_id


@define(eq=False, repr=False, kw_only=True)
class Canaries:
    """Sends the canaries of one relay by ``executor``, and judges whether calls flow.

    ``monotonic`` is in seconds.

    Attributes:
        loop: the progress of ``run``.
        silent: the connected nodes that did not answer their last canary, with the hop that failed.
    """

    _fleet: Fleet
    _executor: CallExecutor
    _audit: AuditWriter
    _ulids: UlidSource
    _metrics: Metrics
    _monotonic: Callable[[], float]
    _log: FilteringBoundLogger
    _sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    _welcomed: set[str] = field(init=False, factory=set)
    _nodes: dict[str, str] = field(init=False, factory=dict)
    _answering: _Turns = field(init=False, factory=_Turns)
    _not_answering: _Turns = field(init=False, factory=_Turns)
    _silent_next: bool = field(init=False, default=False)
    _outcomes: deque[tuple[float, bool]] = field(init=False, factory=deque)  # when, and whether it succeeded
    _relay_failed: bool = field(init=False, default=False)
    _allowed_until_s: float = field(init=False, default=-math.inf)
    _ended: int = field(init=False, default=0)
    """Those that have ended since the last line, and how many of these have failed."""
    _failed: int = field(init=False, default=0)
    _failed_with: str | None = field(init=False, default=None)
    _at_once: asyncio.Semaphore = field(init=False, factory=lambda: asyncio.Semaphore(_AT_ONCE))
    _tasks: set[asyncio.Task[None]] = field(init=False, factory=set)
    silent: dict[str, Hop] = field(init=False, factory=dict)
    loop: Loop = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.loop = Loop(self._monotonic)
        self._fleet.warnings.watch("silent", lambda: self.silent)

    @property
    def connected(self) -> int:
        return len(self._nodes)

    def connection_changed(self, node: NodeRef, connected: bool) -> None:  # noqa: FBT001 - a ConnectionHandler
        """Note that a node has connected, and is to be sent an echo, or that its connection is lost."""
        node_id = node.node_id
        self._welcomed.discard(node_id)
        self.silent.pop(node_id, None)
        # By the tenant that it had: a renewal can give it another during a session.
        tenant = self._nodes.pop(node_id, None)
        if tenant is not None:
            self._answering.discard(tenant, node_id)
            self._not_answering.discard(tenant, node_id)
        if connected:
            self._welcomed.add(node_id)
            self._nodes[node_id] = node.tenant
            self._answering.add(node.tenant, node_id)

    def announced(self, node: NodeRef) -> None:
        if node.node_id in self._welcomed:
            self._welcomed.discard(node.node_id)
            self._start(node.tenant, node.node_id)

    async def run(self) -> None:
        try:
            while True:
                self.loop.busy(INTERVAL_S + _ROUND_S)
                await self._sleep(INTERVAL_S)
                if (chosen := self._next()) is not None:
                    self._start(*chosen)
        finally:
            for task in self._tasks:
                task.cancel()
            if self._ended:
                with suppress(AuditUnavailableError):  # the log has said so
                    self._record()

    def health(self) -> Health:
        """Return whether calls flow, as far as the canaries of the last minute show."""
        recent, oldest_s = self._outcomes, self._monotonic() - WINDOW_S
        while recent and recent[0][0] < oldest_s:
            recent.popleft()
        succeeded = sum(is_answered for _, is_answered in recent)
        if not self._nodes:
            return Health.of(self.loop, ready=True, state="no node is connected")
        if self._relay_failed:
            return Health.of(self.loop, ready=False, state="the relay itself fails; see its log")
        flows = succeeded > 0 or len(recent) < _FEWEST
        return Health.of(self.loop, ready=flows, state=f"{succeeded} of {len(recent)} canaries answered")

    def _next(self) -> tuple[str, str] | None:
        """Return the node whose turn it is, after its tenant: by turns one that answers, and a silent one."""
        turns = (self._answering, self._not_answering)
        chosen, other = reversed(turns) if self._silent_next else turns
        chosen = chosen or other
        self._silent_next = chosen is self._answering
        return chosen.next() if chosen else None

    def _start(self, tenant: str, node_id: str) -> None:
        task = asyncio.create_task(self._echo(tenant, node_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _echo(self, tenant: str, node_id: str) -> None:
        async with self._at_once:
            node = self._fleet.node_of(tenant, node_id)
            tools = node.tools.values() if node is not None else ()
            tool = next((tool for tool in tools if tool.surface.kind.name == _ECHO_KIND), None)
            if tool is not None:  # else it does not announce an echo, or no manifest of it is in force
                await self._call(tenant, tool)

    async def _call(self, tenant: str, tool: Tool) -> None:
        params = {"name": tool.canonical, "arguments": {"message": _MESSAGE}}
        record = CallRecord(self._ulids.new(), Call({"params": params}), self._monotonic())
        record.principal, record.tool, record.is_canary = Principal.of_relay(tenant), tool, True
        failed: str | None = None
        try:
            if self._allowed_until_s <= self._monotonic():
                self._record()
            await self._executor.run(tool, record)
        except ToolError as error:
            failed = error.failure.value.code
            if error.failure in _NOT_A_FAILURE:
                return
        except AuditUnavailableError as error:
            failed = Failure.INTERNAL.value.code
            self._log.error("audit cannot be written; calls are refused", reason=str(error))
        except Exception as error:  # noqa: BLE001 - a bug must fail one canary, not the relay
            failed = Failure.INTERNAL.value.code
            self._log.error("canary failed", correlation_id=record.correlation_id, exc_info=error)
        self._judge(tool.node_id, record.hop, failed)

    def _record(self) -> None:
        """Record that canaries are sent for a minute, and what became of those since the last line."""
        self._audit.write(
            event=CANARIES_EVENT,
            sub="relay",
            code=self._failed_with or "ok",
            count=self._ended,
            failed=self._failed,
        )
        self._allowed_until_s = self._monotonic() + _LINE_S
        self._ended, self._failed, self._failed_with = 0, 0, None

    def _judge(self, node_id: str, hop: Hop, failed: str | None) -> None:
        self._metrics.canaries.labels(failed or "ok", hop if failed else "").inc()
        self._ended += 1
        if failed is not None:
            self._failed, self._failed_with = self._failed + 1, failed
        if node_id not in self._nodes:
            return  # its connection was lost meanwhile: that is no failure of a node that is connected
        self._relay_failed = failed is not None and hop is Hop.RELAY
        tenant = self._nodes[node_id]
        if failed is None or hop is Hop.RELAY or node_id not in self.silent or not self._answering:
            self._outcomes.append((self._monotonic(), failed is None))
        if failed is None or hop is Hop.RELAY:
            if self.silent.pop(node_id, None) is not None:
                self._not_answering.discard(tenant, node_id)
                self._answering.add(tenant, node_id)
                self._log.info("node answers again", node_id=node_id)
        elif node_id not in self.silent:
            self.silent[node_id] = hop
            self._answering.discard(tenant, node_id)
            self._not_answering.add(tenant, node_id)
            self._log.warning("node does not answer", node_id=node_id, hop=hop.value, code=failed)
