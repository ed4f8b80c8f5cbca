"""The parts of a relay around one fleet: all real, on a clock that does not run.

A test takes the parts that it needs; those that reach nodes or agents it makes itself.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from relay.audit.log import AuditLog
from relay.audit.refusal_counts import RefusalCounter
from relay.auth.agent_tokens import Authenticator, TokenIssuer
from relay.calls.access_log import AccessLog
from relay.calls.call_record import CallAnswer
from relay.calls.envelope import EnvelopeCheck
from relay.calls.executor import CallExecutor
from relay.calls.gateway import CallGateway
from relay.calls.idempotency import QUOTA_OF_ALL, IdempotencyStore, IdempotentCalls, Quota
from relay.calls.relay_tools import RelayTools
from relay.fleet.change_notifier import ChangeNotifier
from relay.fleet.fleet import Fleet
from relay.fleet.leaves import FleetTrust, KeptLeaves
from relay.fleet.node_record import Where
from relay.fleet.replay_marks import MarkStore
from relay.fleet.tools import Projector
from relay.limits.rate_limits import Allowance
from relay.mcp_api.assembly import view_tools
from relay.mcp_api.change_streams import ChangeStreams, OpenStreams
from relay.mcp_api.endpoint import McpEndpoint
from relay.mcp_api.log_streams import LogStreams
from relay.mcp_api.methods import Methods
from relay.mcp_api.resources import ResourceCatalog
from relay.mcp_api.sdk import SdkServer, instructions
from relay.mcp_api.tool_list import ToolList
from relay.mcp_api.url_options import UrlOptionReader
from relay.mcp_api.views.find_nodes import Measurements
from relay.observability.metrics import Metrics
from relay.pki.authority import EndorsedRoots
from relay.pki.errors import AuthorityStateError
from relay.pki.renewals import LeafAuthority, OwnLeaves, Renewals
from relay.routing.port import LocalRouter, NodeFrames, Peers
from relay.sessions.connects import ConnectLimiter, ConnectQueue
from relay.sessions.frame_handlers import FrameHandlers
from relay.sessions.handshake import Handshake
from relay.sessions.node_sessions import AUTH_TIMEOUT_S, CapabilityLimits, NodeSessions
from relay.sessions.one_way_frames import OneWayFrames
from relay.settings.config import PER_AGENT, EnvelopeMode
from relay.settings.environment import RelayClock
from relay.state.kinds import watched_names
from relay.state.tokens import key_id
from relay.state.watcher import SHARED, Freshness
from relay.streams.caller_tools.assembly import build as caller_tools
from relay.streams.caller_tools.forwarded_calls import tag_of
from relay.streams.caller_tools.limits import Timeouts
from relay.streams.caller_tools.records import CallerRecords
from relay.streams.caller_tools.registry import Nodes, SessionRegistry
from relay.streams.telemetry.fleet_resource import FleetReading
from relay.streams.telemetry.hub import TelemetryHub
from relay.streams.telemetry.reading import TelemetryResource
from schemas.addresses import mcp_url, mcp_urls
from schemas.frames import FrameReader
from schemas.kinds import KindRegistry
from schemas.process.logs import make_logger
from schemas.registry import SchemaRegistry
from schemas.tokens import AGENT_REF, DEVICE_REF, TokenVerifier
from schemas.trust import TrustRules
from schemas.ulids import UlidSource
from tests.fakes.callers import TOKEN_KEY
from tests.fakes.clock import FakeClock
from tests.fakes.lines import LogLines
from tests.fakes.seconds import Seconds
from tests.fakes.signer import NOW_MS, TENANT, SimulatedCa, SimulatedNode

PUBLIC_URL = "https://relay.example"
READ_ONLY = "tools:call:read_only"


SHIPPED_KINDS = KindRegistry()


@cache
def projector_of(registry: SchemaRegistry, kinds: KindRegistry) -> Projector:
    """Return the projector of a contract: it keeps nothing but what it derives from the contract alone."""
    return Projector(registry, kinds)


class NoAuthority:
    """A CA that is not on this machine."""

    def renew(self, csr_pem: str, node_id: str) -> str:
        raise AuthorityStateError(f"no key to renew {node_id} with, asked by {len(csr_pem)} characters")

    def roots(self) -> list[str]:
        return []

    def endorsement(self) -> str | None:
        return None

    def server_roots(self) -> EndorsedRoots:
        return EndorsedRoots("", [])

    def revoke(self, target: str, reason: str = "revoked") -> list[str]:
        raise AuthorityStateError(f"no key to record that {target} is {reason}")


class Hub:
    """What a relay has before a client connects to it.

    Attributes:
        clock: the system's clock, which the tests move.
        judged_by: the relay's own, which the parts that judge go by.
    """

    def __init__(  # noqa: PLR0913 - what a test may want to have otherwise
        self,
        directory: Path,
        registry: SchemaRegistry,
        *,
        public_url: str = PUBLIC_URL,
        revoked: Iterable[str] = (),
        ca: SimulatedCa | None = None,
        fleet_type: type[Fleet] = Fleet,
        kinds: KindRegistry | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._monotonic = monotonic
        self.registry = registry
        self.public_url = public_url
        self.clock = FakeClock(NOW_MS)
        self.ca = ca or SimulatedCa()
        self.lines = LogLines()
        self.log = make_logger("relay", self.lines)
        self.judged_by = RelayClock(self.clock, self.clock.ticks_ms, self.log)
        self.access_lines = LogLines()
        self.metrics = Metrics()
        self.ulids = UlidSource(self.clock, os.urandom)
        self.one_way = OneWayFrames(self.metrics, self.log)
        self.marks = MarkStore(directory / "marks", self.log)
        self.audit_file = directory / "audit.jsonl"
        self.audit = AuditLog(self.audit_file, self.clock)
        self.seconds = Seconds()
        self.refusals = RefusalCounter(self.audit, self.log, self.seconds, self.ulids.new)
        self.freshness = Freshness((*watched_names(), SHARED), self.seconds)
        for source in (*watched_names(), SHARED):
            self.freshness.read(source)
        kinds = self.kinds = kinds or SHIPPED_KINDS
        self.fleet = fleet_type(
            trust=FleetTrust(
                TrustRules(registry, kinds),
                [self.ca.root_pem],
                frozenset(revoked),
                KeptLeaves(self.marks.load_leaves(self.clock()), self.marks.put_leaf),
            ),
            projector=projector_of(registry, kinds),
            marks=self.marks,
            metrics=self.metrics,
            refusals=self.refusals,
            now_ms=self.judged_by,
            log=self.log,
        )
        self.relay_tools = RelayTools()
        self.options = UrlOptionReader(kinds)
        public_key = bytes(TOKEN_KEY.verify_key)
        self.issuer = TokenIssuer(TOKEN_KEY, public_url, mcp_url(public_url), registry)
        self.authenticator = Authenticator(
            TokenVerifier(registry, AGENT_REF),
            {key_id(public_key): public_key},
            issuer=public_url,
            audiences=mcp_urls(public_url),
            now_ms=self.judged_by,
        )
        self.frames, self.peers = self.reached()
        tag = "" if self.peers is None else tag_of(self.peers.relay)
        self.caller_sessions = SessionRegistry(self.clock, os.urandom, tag)
        self.caller_tools = caller_tools(
            timeouts=Timeouts(),
            registry=self.caller_sessions,
            documents=registry,
            peers=self.peers,
            nodes=Nodes(self.fleet),
            records=CallerRecords(self.audit, self.refusals, self.metrics, self.log),
            authenticator=self.authenticator,
            frames=self.frames,
            ulids=self.ulids,
            monotonic=self.seconds,
            log=self.log,
        )
        for tool in self.caller_tools.tools.tools(registry):
            self.relay_tools.register(tool)

    def reached(self) -> tuple[NodeFrames, Peers | None]:
        """Return what reaches nodes by frames, and the other relays, if there are any."""
        return self.one_way, None

    @cached_property
    def telemetry(self) -> TelemetryHub:
        """The streams, fed by the one-way frames."""
        return TelemetryHub(
            fleet=self.fleet,
            frames=self.frames,
            authenticator=self.authenticator,
            metrics=self.metrics,
            refusals=self.refusals,
            seconds=self.seconds,
            log=self.log,
        )

    def close(self) -> None:
        """Give back what the parts hold."""
        self.audit.close()

    def token(
        self,
        scopes: Sequence[str] = (READ_ONLY,),
        *,
        tenant: str = TENANT,
        sub: str = "agent-1",
        ttl_s: int = 3600,
    ) -> str:
        """Return an agent's token."""
        now_s = self.clock() // 1000
        return self.issuer.issue(
            sub=sub, tenant=tenant, scopes=list(scopes), now_s=now_s, ttl_s=ttl_s, jti=self.ulids.new()
        )

    def announce(self, node: SimulatedNode, **members: Any) -> bytes:
        """Let ``node``'s identity and manifest come from the broker, and return the manifest."""
        wire = node.manifest(**members)
        self.fleet.offer_identity(node.node_id, node.leaf_pem)
        self.fleet.offer_manifest(node.node_id, wire, "broker")
        return wire

    def connect(self, node: SimulatedNode, **members: Any) -> bytes:
        """Let ``node`` announce itself and be connected; return its manifest."""
        wire = self.announce(node, **members)
        self.fleet.connection_changed(node.node_id, Where.HERE)
        return wire

    def gateway(
        self,
        router: LocalRouter,
        monotonic: Callable[[], float] = time.monotonic,
        per_agent: Allowance = PER_AGENT,
        mode: EnvelopeMode = EnvelopeMode.ENFORCE,
        max_keys: int = QUOTA_OF_ALL.keys,
    ) -> CallGateway:
        """Return the gateway in front of ``router``; ``idempotent_calls`` is the hub's."""
        limited = CapabilityLimits(self.fleet, router, monotonic)
        self.access_log = AccessLog(self.access_lines)
        executor = self.executor = CallExecutor(
            limited, self.telemetry, self.audit, monotonic, os.urandom, self.log
        )
        self.idempotent_calls = IdempotentCalls(
            executor, IdempotencyStore[CallAnswer](monotonic, Quota(max_keys, 1 << 26)), self.audit, self.log
        )
        return CallGateway(
            authenticator=self.authenticator,
            envelopes=EnvelopeCheck(self.registry, mode, self.log),
            fleet=self.fleet,
            relay_tools=self.relay_tools,
            streams=self.telemetry,
            executor=executor,
            idempotent_calls=self.idempotent_calls,
            audit=self.audit,
            refusals=self.refusals,
            metrics=self.metrics,
            access_log=self.access_log,
            ulids=self.ulids,
            per_agent=per_agent,
            revocations_known=self.freshness.is_fresh,
            now_ms=self.clock,
            monotonic=monotonic,
            log=self.log,
        )

    def views(self, gateway: CallGateway, monotonic: Callable[[], float] = time.monotonic) -> None:
        """Register the tools of the views, whose calls pass ``gateway``."""
        measurements = Measurements()
        self.executor.on_result(measurements.on_result)
        tools = view_tools(
            registry=self.registry,
            kinds=self.kinds,
            fleet=self.fleet,
            gateway=gateway,
            measured=measurements.last,
            now_ms=self.judged_by,
            monotonic=monotonic,
        )
        for tool in tools:
            self.relay_tools.register(tool)

    def mcp(
        self, gateway: CallGateway, notifier: ChangeNotifier | None = None, streams: OpenStreams | None = None
    ) -> McpEndpoint:
        """Return MCP over ``gateway``."""
        server = SdkServer("0.0.0", partial(instructions, self.fleet))
        telemetry = TelemetryResource(self.telemetry, self.fleet)
        elsewhere = None if self.peers is None else FleetReading(telemetry, self.peers, self.authenticator)
        relay_of = None if self.peers is None else self.peers.relay_of
        resources = ResourceCatalog(self.fleet, self.registry, telemetry, elsewhere, relay_of)
        methods = Methods(
            gateway,
            ToolList(self.fleet, self.relay_tools, self.options),
            self.authenticator,
            resources,
            server.discovered,
        )
        changes = ChangeStreams(
            notifier or ChangeNotifier(self.fleet, self.log),
            telemetry,
            streams or OpenStreams(),
            self.options,
            self.judged_by,
        )
        return McpEndpoint(server, methods, changes, LogStreams(self.caller_tools.streams))

    def handshake(self) -> Handshake:
        """Return who judges nodes."""
        verifier = TokenVerifier(self.registry, DEVICE_REF)
        return Handshake(self.fleet, verifier, self.public_url, os.urandom)

    def sessions(
        self,
        auth_timeout_s: float = AUTH_TIMEOUT_S,
        connect_limiter: ConnectLimiter | None = None,
        authority: LeafAuthority | None = None,
    ) -> NodeSessions:
        """Return the nodes' sessions; without an ``authority`` no leaf is renewed."""
        renewals = Renewals(OwnLeaves(authority or NoAuthority()), self.audit, self.clock, self.log)
        return NodeSessions(
            handshake=self.handshake(),
            fleet=self.fleet,
            frames=FrameHandlers(self.fleet, renewals, self.judged_by.compare, self.one_way),
            one_way=self.one_way,
            connects=ConnectQueue(connect_limiter or ConnectLimiter(), self._monotonic),
            reader=FrameReader(self.registry),
            ulids=self.ulids,
            metrics=self.metrics,
            refusals=self.refusals,
            now_ms=self.judged_by,
            ticks_ms=self.clock.ticks_ms,
            monotonic=self._monotonic,
            log=self.log,
            auth_timeout_s=auth_timeout_s,
        )

    def audited(self) -> list[dict[str, Any]]:
        """Return the lines of the audit, but for what chains them."""
        lines = [json.loads(line) for line in self.audit_file.read_text("ascii").splitlines()]
        return [{name: value for name, value in line.items() if name != "prev"} for line in lines]

    def counted(self, name: str, **labels: str) -> float:
        """Return what the counter ``edge_relay_{name}`` with ``labels`` has; 0 if there was none."""
        return counted(self.metrics, name, **labels)


def counted(metrics: Metrics, name: str, **labels: str) -> float:
    """Return the sum of the samples ``edge_relay_{name}`` whose labels hold ``labels``."""
    wanted = f"edge_relay_{name}"
    # To parse all that is rendered takes longer than most tests.
    lines = [line for line in metrics.render().decode().splitlines() if line.startswith(wanted)]
    return sum(
        sample.value
        for family in text_string_to_metric_families("\n".join(lines))
        for sample in family.samples
        if sample.name == wanted and labels.items() <= sample.labels.items()
    )
