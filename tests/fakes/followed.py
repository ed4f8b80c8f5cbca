"""The streams of one relay over nodes that a test plays, on a clock that it moves. Calls pass the gateway."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relay.auth.agent_tokens import Caller, Principal
from relay.calls.envelope import Call
from relay.calls.executor import CallRequest
from relay.calls.relay_tools import Emit
from relay.calls.results import CallAnswer
from relay.calls.stream_port import Notify
from relay.routing.port import (
    AnnounceHandler,
    Command,
    CommandAnswer,
    ConnectionHandler,
    FrameHandler,
    LocalRouter,
    NodeRef,
)
from relay.streams.telemetry.hub import TelemetryHub
from relay.streams.telemetry.resource import TelemetryResource
from schemas.errors import Failure, ToolError
from schemas.frames import OneWayType
from schemas.projection import META_FOLLOW_S, META_IDEMPOTENCY_KEY
from schemas.registry import SchemaRegistry
from tests.fakes.hub import Hub
from tests.fakes.routers import answered
from tests.fakes.seconds import Seconds
from tests.fakes.signer import METRICS, NODE_ID, NOW_MS, TENANT

FOLLOWED: Mapping[str, Any] = {
    **METRICS,
    "verbs": ["snapshot", "subscribe"],
    "constraints": {"rate_limit_rps": 1000, "max_concurrency": 100, "deadline_ms_default": 1500},
}
CAP_ID = str(METRICS["cap_id"])
SUBSCRIBE = f"sys.{NODE_ID}.{CAP_ID}.subscribe"
URI = f"node://{NODE_ID}/telemetry"


def sample_of(node_id: str = NODE_ID, ts_ms: int = NOW_MS, **members: Any) -> dict[str, Any]:
    """Return a good sample with ``members`` added or overridden."""
    return {
        "ts_ms": ts_ms,
        "node_id": node_id,
        "uptime_s": 1,
        "cpu": {"cores": 1, "usage_pct": 5},
        "load": {"one": 1, "five": 2, "fifteen": 3},
        **members,
    }


@dataclass
class PlayedFrames:
    """The nodes' connections: what is sent to them, and what a test lets them send."""

    sent: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    offline: set[str] = field(default_factory=set)
    limited: bool = False

    def __post_init__(self) -> None:
        self.handlers: dict[OneWayType, FrameHandler] = {}
        self.followers: list[ConnectionHandler] = []

    def send(self, node_id: str, frame_type: OneWayType, payload: Mapping[str, Any]) -> None:
        if node_id in self.offline:
            raise ToolError(Failure.NODE_OFFLINE)
        if self.limited:
            raise ToolError(Failure.RATE_LIMITED)
        assert frame_type is OneWayType.TELEMETRY_LEASE
        self.sent.append((node_id, dict(payload)))

    def on_frame(self, frame_type: OneWayType, handler: FrameHandler) -> None:
        self.handlers[frame_type] = handler

    def on_connection(self, handler: ConnectionHandler) -> None:
        self.followers.append(handler)

    def on_announce(self, handler: AnnounceHandler) -> None:
        raise NotImplementedError


class Answering(LocalRouter):
    """A ``LocalRouter`` whose nodes answer each command with a good sample."""

    def start(self, command: Command) -> CommandAnswer:
        return answered({"ok": True, "result": sample_of(command.node_id)})


class Followed:
    """One relay's streams, and the agents that follow them."""

    def __init__(self, directory: Path, registry: SchemaRegistry, **limits: int) -> None:
        self.hub = Hub(directory, registry)
        self.frames = PlayedFrames()
        self.seconds = Seconds()
        self.streams = TelemetryHub(
            fleet=self.hub.fleet,
            frames=self.frames,
            authenticator=self.hub.authenticator,
            metrics=self.hub.metrics,
            refusals=self.hub.refusals,
            seconds=self.seconds,
            log=self.hub.log,
            **limits,
        )
        self.hub.telemetry = self.streams
        self.resource = TelemetryResource(self.streams, self.hub.fleet)
        self.gateway = self.hub.gateway(Answering(), self.seconds)
        self.node = self.hub.ca.issue()
        self.hub.connect(self.node, capabilities=[FOLLOWED])

    def agent(self, sub: str = "agent-1", **token: Any) -> Principal:
        return self.hub.authenticator.identify(self.hub.token(sub=sub, **token))

    async def subscribe(  # noqa: PLR0913 - what a call can carry
        self,
        agent: Principal,
        interval_ms: int | None = 1000,
        *,
        tool: str = SUBSCRIBE,
        emit: Emit | None = None,
        follow_s: float | None = None,
        key: str | None = None,
        **arguments: Any,
    ) -> CallAnswer:
        """Call ``tool`` under an idempotency ``key``; with ``emit``, by a progress token for ``follow_s``."""
        if interval_ms is not None:
            arguments["interval_ms"] = interval_ms
        params: dict[str, Any] = {"name": tool, "arguments": arguments, "_meta": {}}
        if key is not None:
            params["_meta"][META_IDEMPOTENCY_KEY] = key
        if emit is not None:
            params["_meta"]["progressToken"] = "token-1"
            if follow_s is not None:
                params["_meta"][META_FOLLOW_S] = follow_s
        call = Call({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params})
        return await self.gateway.call(CallRequest(Caller(agent, "http", {}), call, emit))

    def follow(self, agent: Principal, notify: Notify = lambda: None) -> Callable[[], None]:
        """Let ``agent`` listen to the node; return what ends that."""
        stop = self.resource.follow(agent, URI, notify)
        assert stop is not None
        return stop

    def sample(
        self, after_s: float = 1.0, *, tenant: str = TENANT, cap_id: str = CAP_ID, **members: Any
    ) -> None:
        """Let the node send a sample some time after the one before; ``members`` are overridden in it."""
        self.seconds.now += after_s
        sample = sample_of(**{"ts_ms": int(self.seconds.now * 1000) + NOW_MS, **members})
        payload = {"cap_id": cap_id, "sample": sample}
        self.frames.handlers[OneWayType.TELEMETRY](NodeRef(tenant, NODE_ID, "S"), payload)

    def link(self, *, connected: bool) -> None:
        for follower in self.frames.followers:
            follower(NodeRef(TENANT, NODE_ID, "S"), connected)

    def pass_time(self, seconds: int) -> None:
        """Let time pass, with the sweep of each second."""
        for _ in range(seconds):
            self.seconds.now += 1
            self.streams.sweep()

    def leases(self) -> list[tuple[int, int]]:
        """Return interval and time of the leases that were sent since the last call."""
        sent, self.frames.sent = self.frames.sent, []
        return [(lease["interval_ms"], lease["ttl_ms"]) for _, lease in sent]

    def counted(self, name: str, **labels: str) -> float:
        return self.hub.counted(name, **labels)


class Reader:
    """The client of a call that is followed: notes what it is sent, and reads only when it is let."""

    def __init__(self) -> None:
        self.received: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()
        self.reads = asyncio.Event()
        self.reads.set()
        self.error: Exception | None = None

    async def emit(self, method: str, params: Mapping[str, Any]) -> None:
        assert method == "notifications/progress"
        if self.error is not None:
            raise self.error
        self.received.put_nowait(params)
        await self.reads.wait()

    async def next(self) -> Mapping[str, Any]:
        return await asyncio.wait_for(self.received.get(), 30)
