"""The relay's own composition around a fleet that a test makes: its nodes, its clocks, its files.

The parts are those of ``relay.server.app.Relay``, made as it makes them; what is made differently is here.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from prometheus_client.parser import text_string_to_metric_families

from relay.audit.log import AuditUnavailableError
from relay.auth.agent_tokens import AcceptedKeys, TokenIssuer
from relay.auth.permissions import Rights
from relay.calls.gateway import CallGateway
from relay.calls.idempotency import QUOTA_OF_ALL, Quota
from relay.fleet.change_notifier import ChangeNotifier
from relay.fleet.fleet import Fleet
from relay.fleet.leaves import FleetTrust, KeptLeaves
from relay.fleet.node_record import NodeRecord, Where
from relay.fleet.replay_marks import MarkStore
from relay.fleet.tools import Projector
from relay.limits.rate_limits import PER_AGENT, Allowance
from relay.mcp_api.change_streams import OpenStreams
from relay.mcp_api.endpoint import McpEndpoint
from relay.observability.metrics import Metrics
from relay.pki.authority import EndorsedRoots
from relay.pki.errors import AuthorityStateError
from relay.pki.renewals import LeafAuthority, OwnLeaves, Renewals
from relay.routing.port import LocalRouter
from relay.server.app import Relay
from relay.sessions.connects import ConnectLimiter
from relay.sessions.node_sessions import AUTH_TIMEOUT_S, CapabilityLimits, NodeSessions
from relay.settings.config import EnvelopeMode
from relay.state.kinds import watched_names
from relay.state.tokens import AcceptedKey, key_id
from relay.state.watcher import SHARED
from schemas.addresses import HostPort, mcp_url
from schemas.health import Health
from schemas.kinds import KindRegistry
from schemas.registry import SchemaRegistry
from schemas.trust import TrustRules
from tests.fakes.callers import TOKEN_KEY
from tests.fakes.environment import PUBLIC_URL, config, fake_environment
from tests.fakes.lines import LogLines
from tests.fakes.polling import BOUND_S
from tests.fakes.signer import TENANT, SimulatedCa, SimulatedNode

READ_ONLY = "tools:call:read_only"
SHIPPED_KINDS = KindRegistry()

# Made once for each contract: it keeps nothing but what it derives from that.
_projector = lru_cache(maxsize=None)(Projector)


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


class Hub(Relay):
    """What a relay has before a client connects to it; methods make the rest.

    Attributes:
        clock: the system's clock, which the tests move.
        judged_by: the relay's own, which the parts that judge go by.
        seconds: the monotonic clock.
        lines, access_lines: the log, and the access log.
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
        kinds: KindRegistry = SHIPPED_KINDS,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        wanted = replace(config(directory), broker=None, public_url=public_url)
        fake = fake_environment(wanted, registry, kinds)
        self._monotonic = monotonic
        self.registry, self.kinds, self.public_url = registry, kinds, public_url
        self.clock, self.seconds, self.lines, self.access_lines = (
            fake.clock,
            fake.seconds,
            fake.lines,
            LogLines(),
        )
        environment = replace(fake.environment, lines=cast("Any", self.access_lines))
        self.metrics, self.ulids, self.judged_by = environment.metrics, environment.ulids, environment.clock
        self.begin(environment)
        self.reserve.close()  # a test process makes thousands of hubs, each of which would hold descriptors
        for source in (*watched_names(), SHARED):
            self.freshness.read(source)
        self.make_audit()
        self.audit.loop_wait_s = BOUND_S  # its thread may wait long for one of the cores that run tests
        self.audit_file = environment.config.state.audit
        self.ca = ca or SimulatedCa()
        public_key = bytes(TOKEN_KEY.verify_key)
        self.issuer = TokenIssuer(TOKEN_KEY, public_url, mcp_url(public_url), registry)
        self.accepted_keys = AcceptedKeys(self.clock)
        self.accepted_keys.accept({key_id(public_key): AcceptedKey(public_key, None)})
        self.make_authenticator()
        self.marks = MarkStore(environment.config.state.marks, self.log)
        self.trust = FleetTrust(
            TrustRules(registry, kinds),
            [self.ca.root_pem],
            frozenset(revoked),
            KeptLeaves(self.marks.load_leaves(self.clock()), self.marks.put_leaf),
        )
        self.projector = _projector(registry, kinds)
        self.make_fleet(fleet_type)
        self.reach_nodes()
        self.make_telemetry()
        self.make_caller_tools()

    def reach_nodes(self) -> None:
        """Set what reaches nodes by frames, and the other relays, if there are any."""
        self.frames, self.peers = self.one_way, None

    def close(self) -> None:
        self.audit.close()

    def token(  # noqa: PLR0913 - what a token may say
        self,
        scopes: Sequence[str] = (READ_ONLY,),
        *,
        tenant: str = TENANT,
        sub: str = "agent-1",
        ttl_s: int = 3600,
        kinds: Sequence[str] = (),
        nodes: Sequence[str] = (),
    ) -> str:
        now_s, jti = self.clock() // 1000, self.ulids.new()
        return self.issuer.issue(
            sub=sub,
            tenant=tenant,
            scopes=list(scopes),
            now_s=now_s,
            ttl_s=ttl_s,
            jti=jti,
            kinds=kinds,
            nodes=nodes,
        )

    def nodes_of(self, tenant: str) -> list[NodeRecord]:
        """Return the nodes of ``tenant`` that lists show, by id."""
        return self.fleet.reach.behind(Rights.of(tenant, ()), "", 1000)

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
        wanted = replace(self.environment.config, per_agent=per_agent, envelope_mode=mode)
        self.environment = replace(self.environment, config=wanted, monotonic=monotonic)
        self.router = CapabilityLimits(self.fleet, router, monotonic)
        self.make_calls(Quota(max_keys, 1 << 26))
        return self.call_gateway

    def mcp(
        self, gateway: CallGateway, notifier: ChangeNotifier | None = None, streams: OpenStreams | None = None
    ) -> McpEndpoint:
        self.call_gateway, self.notifier = gateway, notifier or self.notifier
        self.make_mcp(streams)
        return self.mcp_endpoint

    def sessions(
        self,
        auth_timeout_s: float = AUTH_TIMEOUT_S,
        connect_limiter: ConnectLimiter | None = None,
        authority: LeafAuthority | None = None,
    ) -> NodeSessions:
        """Return the nodes' sessions; without an ``authority`` no leaf is renewed."""
        self.renewals = Renewals(OwnLeaves(authority or NoAuthority()), self.audit, self.clock, self.log)
        self.environment = replace(self.environment, monotonic=self._monotonic)
        self.make_sessions(auth_timeout_s, connect_limiter)
        return self.node_sessions

    def serve(self, listen: HostPort) -> None:
        """Make the application that is served at ``listen``."""
        wanted = replace(self.environment.config, listen=listen)
        self.environment = replace(self.environment, config=wanted)
        self.enrolment_endpoint = cast("Any", SimpleNamespace(routes=list))
        self.make_listener()

    def health(self) -> Mapping[str, Health]:
        """Return that of the parts that every test has."""
        return {
            "audit": Health.passive(ready=self.audit.available),
            "clock": Health.passive(ready=self.judged_by.is_trusted()),
        }

    def audited(self) -> list[dict[str, Any]]:
        """Return the lines of the audit, but for what chains them."""
        with suppress(AuditUnavailableError):  # some tests break its file
            self.audit.flush()
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
