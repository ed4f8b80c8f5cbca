"""The relay's composition: each part once, made of the parts that it names.

It reads from the bottom of the picture in docs/architecture.md to its top. The tests make some of the parts
so, around an environment and nodes of their own (``tests.fakes.hub``). Options that the settings do not ask
for are not imported. Must not contain behaviour of its own.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from resource import RLIMIT_NOFILE, getrlimit
from typing import TYPE_CHECKING, Any, Protocol

from nacl.signing import SigningKey
from starlette.routing import Route

from relay.audit.log import AuditLog
from relay.audit.refusal_counts import RefusalCounter
from relay.audit.retention import file_bytes
from relay.audit.writer import AuditWriter
from relay.auth.agent_tokens import AcceptedKeys, Authenticator, ExternalIssuer
from relay.auth.issuer_keys import IssuerKeys, JwksReader, JwksSource
from relay.calls.access_log import AccessLog
from relay.calls.canaries import Canaries
from relay.calls.envelope import EnvelopeCheck
from relay.calls.executor import CallExecutor
from relay.calls.gateway import CallGateway
from relay.calls.idempotency import QUOTA_OF_ALL, IdempotencyStore, IdempotentCalls, KeyedCommands, Quota
from relay.calls.relay_tools import RelayTools
from relay.calls.results import CallAnswer
from relay.fleet.change_notifier import ChangeNotifier
from relay.fleet.fleet import Fleet
from relay.fleet.leaves import FleetTrust, KeptLeaves
from relay.fleet.mqtt_feed import MqttFeed
from relay.fleet.node_record import Where
from relay.fleet.replay_marks import MarkStore
from relay.fleet.tools import Projector
from relay.http.connections import Bounds, Connections, refusal_log
from relay.http.front_page import FrontPage
from relay.http.proxies import TrustedProxies
from relay.http.request_guard import AllowedHosts, RequestGuard
from relay.http.request_meter import RequestMeter, RequestSource, waiting_log
from relay.http.routes import METRICS_CONNECTIONS, MetricsPage, make_routes, resource_metadata_routes
from relay.mcp_api.change_streams import ChangeStreams, LogStreams, OpenStreams
from relay.mcp_api.endpoint import McpEndpoint, Methods
from relay.mcp_api.resources import ResourceCatalog
from relay.mcp_api.sdk import SdkServer, instructions
from relay.mcp_api.tool_list import ToolList
from relay.mcp_api.url_options import UrlOptionReader
from relay.mcp_api.views.find_nodes import FindNodes, Measurements
from relay.mcp_api.views.kind_tools import KindTool
from relay.mcp_api.views.many_nodes import ManyNodes
from relay.mcp_api.views.node_choice import NodeChoice
from relay.observability.node_labels import with_labels
from relay.pki.authority import CertificateAuthority
from relay.pki.broker_access import BrokerAccess
from relay.pki.enrolment_endpoint import EnrolmentEndpoint
from relay.pki.enrolments import CountedUses, EnrolmentInfo, Enrolments, PkiEnvironment
from relay.pki.forwarding import AuthorityService, ForwardedEnrolments, ForwardedLeaves
from relay.pki.relay_tls import Expiries, RelayTls
from relay.pki.renewals import OwnLeaves, Renewals
from relay.routing.authority_port import AuthorityAction, AuthorityLink
from relay.routing.port import NodeRef
from relay.server.decisions import (
    DecisionRecords,
    FollowUps,
    LeafDecisions,
    NameDecisions,
    grant_endings,
    key_endorsement,
    person_decisions,
    seal_decisions,
    token_decisions,
    token_key_decisions,
)
from relay.sessions.connects import ConnectLimiter, ConnectQueue
from relay.sessions.frame_handlers import FrameHandlers
from relay.sessions.handshake import Handshake
from relay.sessions.node_sessions import AUTH_TIMEOUT_S, CapabilityLimits, NodeSessions
from relay.sessions.one_way_frames import OneWayFrames
from relay.settings.config import AuditSync, RelayConfig
from relay.settings.environment import RelayEnvironment
from relay.state.certificates import IssuedLeaf
from relay.state.grants import Grants
from relay.state.join_tokens import JoinTokens
from relay.state.key_files import load_or_create_key
from relay.state.kinds import (
    CERTIFICATES,
    FLEET_SEAL,
    JOIN_TOKENS,
    NODE_NAMES,
    PEOPLE,
    REVOKED_TOKENS,
    VERIFYING_KEYS,
    files_of,
    shared_ledgers,
    watched_names,
)
from relay.state.ledger import Ledger
from relay.state.merging import Merging, SharedLedger, StateFile
from relay.state.names import NameLedger
from relay.state.people import People, PeopleLedger
from relay.state.seal import FleetSeal
from relay.state.sharer import NotShared
from relay.state.tokens import RevokedTokens, TokenKeys
from relay.state.watcher import (
    LOOK_S,
    POLL_S,
    SHARED,
    DescriptorReserve,
    Freshness,
    LedgerThreads,
    Watcher,
    watched_files,
)
from relay.streams.caller_tools.caller_sessions import CallerSessions
from relay.streams.caller_tools.endings import CallerRecords, Endings, Expiry, Outbox
from relay.streams.caller_tools.event_streams import EventStreams, Polls
from relay.streams.caller_tools.node_requests import NodeRequests
from relay.streams.caller_tools.registry import Nodes, SessionRegistry
from relay.streams.caller_tools.session import NODE_BYTES, TOTAL_BYTES, SharedBudget, Timeouts
from relay.streams.caller_tools.tools import ForwardedCalls, SessionTools, tag_of
from relay.streams.telemetry.hub import TelemetryHub
from relay.streams.telemetry.resource import FleetTelemetry, TelemetryResource
from schemas.addresses import mcp_urls
from schemas.delivery import CALL_BUDGET_MS
from schemas.error_roots import OperatorError
from schemas.frames import FrameReader, OneWayType
from schemas.health import Health, Loop, endless
from schemas.tokens import AGENT_REF, DEVICE_REF, EXTERNAL_AGENT_REF, EXTERNAL_HEADER_REF, TokenVerifier
from schemas.trust import TrustRules

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    from relay.broker.supervisor import RelayBroker
    from relay.cluster.cluster import Cluster
    from relay.routing.port import Command, LocalRouter, NodeFrames, NodeRouter, Peers
    from relay.state.sharer import Sharing
    from relay.state.watcher import Applied

DRAIN_S = CALL_BUDGET_MS / 1000 + 0.5
"""How long the calls in flight are waited for at the end."""
_CLIENT_ID_BYTES = 4
_SEED_BYTES = 32


class ClusterExtraError(OperatorError):
    """The library of NATS is not installed."""


class OwnBrokerError(OperatorError):
    """A relay without the CA's key cannot run a broker of its own."""


class Background(Protocol):
    """What works beside the calls; without progress of its ``loop`` the relay should be restarted."""

    @property
    def loop(self) -> Loop: ...
    async def run(self) -> None: ...


class Relay:
    """The parts of one relay. Each method makes those of one package of the picture, of those before them.

    Raises:
        AuthorityError: there is no CA, or a file of it is damaged.
        ClusterExtraError: the extra is not installed.
        CredentialsError: those of the cluster cannot be used.
        ExposedFileError: others can read the token key.
        LedgerError: the list of token keys is damaged.
        OwnBrokerError: it is to run a broker of its own, without the CA's key.
        OSError: the state directory cannot be used.
    """

    def __init__(self, environment: RelayEnvironment) -> None:
        self.begin(environment)
        environment.metrics.watch_health(self.health)
        self.open_authority()  # before anything else is opened, since its error says what to do first
        self.make_audit()
        self.make_certificates()
        self.make_token_keys()
        self.make_authenticator()
        self.make_trust()
        self.make_fleet()
        self.make_sessions()
        self.join_cluster()
        self.make_telemetry()
        self.make_calls()
        self.make_canaries()
        self.make_views()
        self.make_caller_tools()
        self.make_mcp()
        self.make_listener()
        self.make_follow_ups()
        self.watcher = self.make_watcher()
        self.watcher.begin()
        self.fleet.check_complete()
        self.background = self._background()

    def begin(self, environment: RelayEnvironment) -> None:
        """Make what nothing else is needed for."""
        self.environment = environment
        self.log: FilteringBoundLogger = environment.log
        self.reserve = DescriptorReserve()
        state = environment.config.state
        oidc = environment.config.oidc
        self.people = PeopleLedger(
            state.people,
            environment.now_ms,
            environment.random_bytes,
            issuer=None if oidc is None else oidc.issuer,
        )
        self.signs_in = False
        self.freshness = Freshness((*watched_names(), SHARED), environment.monotonic)
        self.relay_tools = RelayTools()
        self.timeouts = Timeouts(request=environment.config.caller_timeout_s)
        self.options = UrlOptionReader(environment.kinds, environment.config.default_view)

    def open_authority(self) -> None:
        """Open the CA. One of a version without roots of servers gets one."""
        environment = self.environment
        authority = self.authority = CertificateAuthority(
            environment.config.state.ca, environment.now_ms, environment.random_bytes
        )
        authority.root_pem()
        if authority.add_server_root():
            self.log.warning("root of servers made: make a backup", file=str(authority.servers.root_file))

    def make_audit(self) -> None:
        environment = self.environment
        config, now_ms = environment.config, environment.now_ms
        file = AuditLog(config.state.audit, now_ms, file_bytes(config.audit_keep))
        always = config.audit_sync is AuditSync.ALWAYS
        self.audit = AuditWriter(file, now_ms, self.log, always, config.audit_keep)
        self.refusals = RefusalCounter(self.audit, self.log, environment.monotonic, environment.ulids.new)

    def make_certificates(self) -> None:
        """Make what is issued by the CA, and who admits by it. ``forwards``: another relay has its key."""
        environment, authority, log = self.environment, self.authority, self.log
        config, now_ms, random_bytes = environment.config, environment.now_ms, environment.random_bytes
        self.forwards = forwards = config.cluster is not None and not authority.can_issue()
        if forwards:
            log.info("the CA's key is on another relay: enrolments and renewals are forwarded")
        if forwards and config.own_broker is not None:
            raise OwnBrokerError(
                "this relay has no CA key, so it runs no broker: name the fleet's with --broker"
            )
        self.authority_link = link = AuthorityLink()

        async def certified_elsewhere(use: str, public_key: str) -> str:
            answer = await link.ask(AuthorityAction.CERTIFY, {"use": use, "public_key": public_key})
            return str(answer["certificate"])

        self.name_ledger = NameLedger(config.state.node_names, now_ms)
        self.join_tokens = JoinTokens(config.state.join_tokens, now_ms, random_bytes)
        self.counted_uses = CountedUses(self.join_tokens)
        pki = PkiEnvironment(authority, self.audit, self.refusals, log, now_ms)
        enrolments = Enrolments(
            pki,
            join_tokens=self.join_tokens,
            fleet=None if config.cluster is None else self.counted_uses,
            name_node=self.name_ledger.name_new,
            info=EnrolmentInfo(config.public_url, config.node_broker or config.broker, config.own_root),
        )
        issuer = ForwardedLeaves(link) if forwards else OwnLeaves(authority)
        self.renewals = Renewals(issuer, self.audit, now_ms, log)
        self.authority_service = (
            None
            if forwards
            else AuthorityService(
                pki, enrolments=enrolments, renewals=self.renewals, public_url=config.public_url
            )
        )
        self.enrolment_endpoint = EnrolmentEndpoint(
            pki,
            ForwardedEnrolments(link, self.audit, log) if forwards else enrolments,
            environment.registry,
        )
        self.tls = RelayTls(
            config,
            authority,
            certify=certified_elsewhere if forwards else None,
            now_ms=now_ms,
            random_bytes=random_bytes,
            log=log,
        )
        self.expiries = expiries = Expiries(config, authority.root_pem)
        environment.metrics.watch_certificates(expiries.names, expiries.end_ms)
        self.own_broker = self._own_broker()
        directory = config.broker_directory or config.state.broker
        self.broker_access = BrokerAccess(authority, directory, config.broker_pid_file, log, self.own_broker)

    def _own_broker(self) -> "RelayBroker | None":
        if (listen := self.environment.config.own_broker) is None:
            return None
        from relay.broker.nats_server import AccessFiles, find_nats_server  # noqa: PLC0415 - an option
        from relay.broker.store import BrokerStore  # noqa: PLC0415 - as above
        from relay.broker.supervisor import BrokerSupervisor, RelayBroker  # noqa: PLC0415 - as above

        environment, state = self.environment, self.environment.config.state
        access, probe_node = None, environment.ulids.new().lower()
        if listen.tls:
            tls, roots = state.broker_tls, state.broker / "roots.pem"
            access = AccessFiles(tls.certificate, tls.key, roots, "nats-users.conf")
        supervisor = BrokerSupervisor(
            listen,
            state.broker,
            access,
            find_program=find_nats_server,
            on_end=environment.metrics.broker_ends.inc,
            probe_node=probe_node,
            log=self.log,
            monotonic=environment.monotonic,
        )
        store = BrokerStore(
            lambda: supervisor.own_port,
            SigningKey(environment.random_bytes(_SEED_BYTES)),
            environment.metrics.broker_store_filled.set,
            self.log,
        )
        return RelayBroker(supervisor, store, access is not None, probe_node)

    def make_token_keys(self) -> None:
        """Make the keys of tokens, this relay's own among them if it has the CA's key, or its fleet alone.

        Without that key, a relay of a cluster has none: another one issues the tokens.
        """
        environment, ca = self.environment, self.authority
        state, now_ms, issues = environment.config.state, environment.now_ms, ca.can_issue()
        own = None
        if issues or environment.config.cluster is None:
            own = bytes(load_or_create_key(state.token_key, environment.random_bytes).verify_key)
        self.token_keys = TokenKeys(state.token_keys, ca, now_ms, None if issues else own)
        if issues and own is not None:
            # Of a key that was replaced by removing its file, no token is accepted any more.
            self.token_keys.add(own, now_ms())
        self.accepted_keys = AcceptedKeys(environment.clock)
        self.accepted_keys.accept(self.token_keys.accepted())
        self.revoked_tokens = RevokedTokens(state.revoked_tokens)
        self.grants = Grants(state.grants, self.revoked_tokens, now_ms, environment.random_bytes)
        self.fleet_seal = FleetSeal(state.cluster_seal, ca)

    def make_authenticator(self) -> None:
        environment, registry, config = self.environment, self.environment.registry, self.environment.config
        self.external_issuer = None
        if named := config.external_issuer:
            issuer_keys = IssuerKeys(
                fetch=JwksSource(named.jwks_url).fetch,
                read=JwksReader(registry, self.accepted_keys).keys,
                monotonic=environment.monotonic,
                metrics=environment.metrics,
                log=self.log,
            )
            verifier = TokenVerifier(registry, EXTERNAL_AGENT_REF, EXTERNAL_HEADER_REF)
            self.external_issuer = ExternalIssuer(named.issuer, verifier, issuer_keys)
        self.authenticator = Authenticator(
            TokenVerifier(registry, AGENT_REF),
            self.accepted_keys,
            issuer=config.public_url,
            audiences=mcp_urls(config.public_url),
            now_ms=environment.clock,
            external=self.external_issuer,
            keeps_tokens=config.cluster is not None,
        )

    def make_trust(self) -> None:
        """Make what leaves and manifests are judged by. ``marks`` keeps those that were accepted."""
        environment, authority = self.environment, self.authority
        self.projector = Projector(environment.registry, environment.kinds)
        self.marks = MarkStore(environment.config.state.marks, self.log)
        self.trust = FleetTrust(
            TrustRules(environment.registry, environment.kinds),
            [authority.root_pem()],
            authority.revoked_kids(),
            KeptLeaves(self.marks.load_leaves(environment.clock()), self.marks.put_leaf),
        )

    def make_fleet(self, fleet_type: type[Fleet] = Fleet) -> None:
        """Make the nodes and their tools; from here on, a line of the log with a node has its label too."""
        environment = self.environment
        self.fleet = fleet_type(
            trust=self.trust,
            projector=self.projector,
            marks=self.marks,
            metrics=environment.metrics,
            refusals=self.refusals,
            now_ms=environment.clock,
            log=self.log,
        )
        self.notifier = ChangeNotifier(self.fleet, self.log)
        self.feed = None
        if (broker := environment.config.broker) is not None:
            self.feed = MqttFeed(
                broker=broker,
                # Not the process id: in containers it is often 1, and of two equal ids one is disconnected.
                client_id=f"edge-relay-{environment.random_bytes(_CLIENT_ID_BYTES).hex()}",
                fleet=self.fleet,
                registry=environment.registry,
                metrics=environment.metrics,
                refusals=self.refusals,
                log=self.log,
                tls=self.tls.to_broker,
            )
        self.log = with_labels(self.log, self.fleet.names.label_of)
        self.one_way = OneWayFrames(environment.metrics, self.log)

    def make_sessions(
        self, auth_timeout_s: float = AUTH_TIMEOUT_S, connect_limiter: ConnectLimiter | None = None
    ) -> None:
        """Make the sessions of the nodes that are connected to this process."""
        environment, fleet = self.environment, self.fleet
        verifier, url = TokenVerifier(environment.registry, DEVICE_REF), environment.config.public_url
        self.handshake = Handshake(fleet, verifier, url, environment.random_bytes)
        self.node_sessions = NodeSessions(
            handshake=self.handshake,
            fleet=fleet,
            frames=FrameHandlers(fleet, self.renewals, environment.clock.compare, self.one_way),
            one_way=self.one_way,
            connects=ConnectQueue(connect_limiter or ConnectLimiter(), environment.monotonic),
            reader=FrameReader(environment.registry),
            ulids=environment.ulids,
            metrics=environment.metrics,
            refusals=self.refusals,
            now_ms=environment.clock,
            ticks_ms=environment.ticks_ms,
            monotonic=environment.monotonic,
            log=self.log,
            auth_timeout_s=auth_timeout_s,
        )
        self.own_nodes: LocalRouter = CapabilityLimits(fleet, self.node_sessions, environment.monotonic)

    def join_cluster(self) -> None:
        """Make what reaches the nodes: of this relay alone, or of all relays of its cluster."""
        self.ledgers = self.open_ledgers()
        self.router: NodeRouter = self.own_nodes
        self.frames: NodeFrames = self.one_way
        self.peers: Peers | None = None
        self.sharing: Sharing = NotShared()
        self.cluster = cluster = self._cluster()
        if cluster is not None:
            self.authority_link.connect(cluster.authority)
            self.counted_uses.connect(cluster.ledgers)
            self.router, self.frames, self.peers = cluster.router, cluster.frames, cluster.peers
            self.sharing = cluster.ledgers
        self.one_way.on_frame(OneWayType.FINDINGS, self._found)

    def _found(self, node: NodeRef, reported: Mapping[str, Any]) -> None:
        """Take what a node of this relay has reported to be wrong with it."""
        self.fleet.found(node.node_id, reported["findings"])
        if self.cluster is not None:
            self.cluster.bucket.found(node, reported["findings"])

    def _cluster(self) -> "Cluster | None":
        environment, config, fleet = self.environment, self.environment.config.cluster, self.fleet
        if config is None:
            return None
        try:
            from relay.cluster.cluster import Cluster  # noqa: PLC0415 - an option, with the library of NATS
            from relay.cluster.presence import Effects  # noqa: PLC0415 - as above
            from relay.cluster.sealed_link import RelayTrust  # noqa: PLC0415 - as above
        except ModuleNotFoundError:
            raise ClusterExtraError("--cluster needs the extra 'cluster' (docs/install.md)") from None
        monotonic = environment.monotonic
        keyed = KeyedCommands(self.own_nodes, IdempotencyStore[str](monotonic), monotonic)

        def show(node_id: str, elsewhere: bool) -> bool:  # noqa: FBT001 - as ``Effects`` has it
            return fleet.connection_changed(node_id, Where.ELSEWHERE if elsewhere else Where.NOWHERE)

        return Cluster(
            replace(environment, log=self.log),
            config,
            local=keyed,
            local_frames=self.one_way,
            effects=Effects(
                self.node_sessions.end_superseded, show, keyed.moved, keyed.history_unknown, fleet.found
            ),
            tenant_of=fleet.tenant_of,
            ledgers=self._shared_ledgers(),
            on_thread=LedgerThreads(self.reserve, 1, "shared").run,
            authority=self.authority_service,
            roots=lambda: list(fleet.trust.root_kids()),  # of the trust of the moment: a change replaces it
            trust=RelayTrust(
                lambda der: fleet.trust.relay(der, environment.clock()),
                lambda der: fleet.trust.relay(der, environment.clock(), may_have_ended=True),
                lambda one: fleet.trust.accepts(one),  # noqa: PLW0108 - the trust of the moment, as above
            ),
            record=self._record_command,
        )

    def _record_command(self, relay: str, command: "Command") -> None:
        """Write to the audit that another relay has a command run here, which has decided that it may be."""
        self.audit.write(
            event="command_of_another_relay",
            relay=relay,
            correlation_id=command.correlation_id,
            node_id=command.node_id,
            tool=command.tool,
            agent=command.caller,
        )

    def make_telemetry(self) -> None:
        """Make the streams of samples."""
        environment = self.environment
        self.telemetry = TelemetryHub(
            fleet=self.fleet,
            frames=self.frames,
            authenticator=self.authenticator,
            metrics=environment.metrics,
            refusals=self.refusals,
            seconds=environment.monotonic,
            log=self.log,
        )

    def make_calls(self, quota: Quota = QUOTA_OF_ALL) -> None:
        """Make the gateway of every call; ``quota`` bounds what is kept of calls with a key."""
        environment, monotonic, log = self.environment, self.environment.monotonic, self.log
        self.access_log = AccessLog(environment.lines)
        self.executor = CallExecutor(
            self.router, self.telemetry, self.audit, monotonic, environment.random_bytes
        )
        self.idempotent_calls = IdempotentCalls(
            self.executor, IdempotencyStore[CallAnswer](monotonic, quota), self.audit, log
        )
        self.call_gateway = CallGateway(
            authenticator=self.authenticator,
            envelopes=EnvelopeCheck(environment.registry, environment.config.envelope_mode, log),
            fleet=self.fleet,
            relay_tools=self.relay_tools,
            streams=self.telemetry,
            executor=self.executor,
            idempotent_calls=self.idempotent_calls,
            audit=self.audit,
            refusals=self.refusals,
            metrics=environment.metrics,
            access_log=self.access_log,
            ulids=environment.ulids,
            per_agent=environment.config.per_agent,
            revocations_known=self.freshness.is_fresh,
            now_ms=environment.now_ms,
            monotonic=monotonic,
            log=log,
            spans=environment.spans,
        )

    def make_canaries(self) -> None:
        """Make the relay's own calls, by which it is known whether calls flow."""
        self.canaries = Canaries(
            fleet=self.fleet,
            executor=self.executor,
            audit=self.audit,
            ulids=self.environment.ulids,
            metrics=self.environment.metrics,
            monotonic=self.environment.monotonic,
            log=self.log,
        )
        self.frames.on_connection(self.canaries.connection_changed)
        self.frames.on_announce(self.canaries.announced)

    def make_views(self) -> None:
        """Register the tools by which agents reach a large fleet.

        Raises:
            ValueError: a verb has a member of the name of one of theirs.
        """
        registry, kinds, gateway = self.environment.registry, self.environment.kinds, self.call_gateway
        measurements = Measurements(self.fleet.tenant_of)
        self.executor.on_result(measurements.on_result)
        self.telemetry.on_sample(measurements.keep)
        choice = NodeChoice(self.fleet, self.environment.clock, gateway.charge)
        many = ManyNodes(gateway, self.environment.monotonic)
        search = FindNodes(self.fleet, kinds, measurements.last, gateway.charge)
        self.relay_tools.register(search.tool(registry))
        for kind in kinds:
            for verb in kind.verbs.values():
                self.relay_tools.register(KindTool(registry, kind, verb, choice, many).tool())

    def make_caller_tools(self) -> None:
        """Make the sessions of callers with nodes, and register the tools by which they are used."""
        environment, monotonic, log = self.environment, self.environment.monotonic, self.log
        peers, frames, authenticator = self.peers, self.frames, self.authenticator
        tag = "" if peers is None else tag_of(peers.relay)
        registry = SessionRegistry(environment.now_ms, environment.random_bytes, tag)
        nodes = Nodes(self.fleet)
        records = CallerRecords(self.audit, self.refusals, environment.metrics, log)
        budget = SharedBudget(NODE_BYTES, TOTAL_BYTES)
        outbox = Outbox(frames, log, records.frame_dropped)
        endings = Endings(registry, outbox, records, budget, monotonic)
        requests = NodeRequests(registry, endings, outbox, records, environment.ulids, monotonic)
        requests.follow(frames)
        sessions = CallerSessions(
            registry=registry,
            nodes=nodes,
            endings=endings,
            outbox=outbox,
            records=records,
            budget=budget,
            polls=Polls(endings, monotonic),
            timeouts=self.timeouts,
            monotonic=monotonic,
        )
        self.expiry = Expiry(registry, endings, outbox, nodes, authenticator, self.timeouts, monotonic, log)
        forwarded = leave_elsewhere = None
        if peers is not None:
            forwarded = ForwardedCalls(
                peers, sessions, registry, endings, nodes, authenticator, environment.registry
            )
            leave_elsewhere = partial(forwarded.leave, plainly=True)
        self.event_streams = EventStreams(authenticator, nodes, endings, leave_elsewhere, monotonic, log)
        tools = SessionTools(sessions, registry, self.event_streams, endings, forwarded)
        for tool in tools.tools(environment.registry):
            self.relay_tools.register(tool)
        self.caller_sessions, self.caller_budget = registry, budget
        self.caller_requests, self.caller_outbox = requests, outbox

    def make_mcp(self, open_streams: OpenStreams | None = None) -> None:
        """Make MCP in both protocol eras, and the resource of telemetry: of this relay, or of all of them."""
        fleet, registry, options = self.fleet, self.environment.registry, self.options
        server = SdkServer(version("edge-kubelet"), partial(instructions, fleet))
        relay_of = None if self.peers is None else self.peers.relay_of
        here, monotonic = TelemetryResource(self.telemetry, fleet), self.environment.monotonic
        everywhere = None
        if self.peers is not None:
            everywhere = FleetTelemetry(here, self.peers, self.authenticator, monotonic)
        self.telemetry_everywhere = everywhere
        methods = Methods(
            self.call_gateway,
            ToolList(fleet, self.relay_tools, options),
            self.authenticator,
            ResourceCatalog(fleet, registry, everywhere or here, relay_of),
            server.discovered,
            self.environment.random_bytes,
        )
        changes = ChangeStreams(
            self.notifier,
            everywhere or here,
            open_streams or OpenStreams(),
            options,
            self.environment.clock,
        )
        self.mcp_endpoint = McpEndpoint(server, methods, changes, LogStreams(self.event_streams))

    def make_listener(self) -> None:
        """Make the ASGI application of the whole relay, and the connections that it is served on."""
        environment, config, mcp = self.environment, self.environment.config, self.mcp_endpoint
        issuers = [config.external_issuer.issuer] if config.external_issuer else []
        self.application = RequestGuard(
            allowed=AllowedHosts.of(
                config.public_url, config.listen, tls=config.tls is not None, metrics=config.old_metrics
            ),
            authenticator=self.authenticator,
            metadata_of=config.public_url if config.external_issuer else None,
            metrics=environment.metrics,
            refusals=self.refusals,
            mcp=mcp,
            mcp_direct=mcp.begin,
            node_sessions=self.node_sessions.serve,
            other=make_routes(
                public_url=config.public_url,
                registry=environment.registry,
                metrics=environment.metrics,
                health=self.health,
                running=mcp.running,
                issuers=issuers,
                more=self.enrolment_endpoint.routes(),
            ),
            page=FrontPage(config.public_url, issuers).page,
        )
        descriptors, _ = getrlimit(RLIMIT_NOFILE)
        bounds, refused = Bounds.below(descriptors), environment.metrics.connections_refused
        self.connections = Connections(
            bounds,
            refused,
            on_refused=refusal_log(self.log, bounds, descriptors),
            meter=self._request_meter(),
            proxies=TrustedProxies(config.trusted_proxies),
        )
        self.metrics_page = MetricsPage(environment.metrics)
        self.metrics_connections = Connections(METRICS_CONNECTIONS, refused)

    def _request_meter(self) -> RequestMeter:
        environment, config = self.environment, self.environment.config
        report = waiting_log(self.log, environment.monotonic)

        def on_wait(source: RequestSource) -> None:
            environment.metrics.requests_delayed.labels(source.kind).inc()
            report(source)

        return RequestMeter(config.per_agent, environment.monotonic, on_wait)

    # --- what takes effect when the operator decides something -----------------------------------------

    def open_ledgers(self) -> Mapping[StateFile, Ledger[Any]]:
        """Return the files of the operator's decisions that this relay reads."""
        root = self.environment.config.state.root
        return {file: file.ledger(root) for file in files_of()} | {
            CERTIFICATES: self.authority.ledger,
            REVOKED_TOKENS: self.revoked_tokens.ledger,
            JOIN_TOKENS: self.join_tokens.ledger,
            VERIFYING_KEYS: self.token_keys.ledger,
            FLEET_SEAL: self.fleet_seal.ledger,
            NODE_NAMES: self.name_ledger.ledger,
            PEOPLE: self.people.ledger,
        }

    def _shared_ledgers(self) -> Sequence[SharedLedger]:
        """Return what all relays of a fleet must know of the operator's decisions."""
        entries = self.environment.metrics.cluster_entries
        merging = Merging(
            self.environment.now_ms,
            self.log,
            issues=self.authority.can_issue(),
            is_endorsed={"token_key": self.token_keys.is_endorsed, "seal": self.fleet_seal.is_endorsed},
            refused=lambda kind: entries.labels(kind, "not_endorsed").inc(),
        )
        return shared_ledgers(self.ledgers, merging)

    def make_follow_ups(self) -> None:
        """Make the work after each change of certificates or roots."""
        endorse, log = key_endorsement(self.token_keys, self.environment.log), self.log
        follow = [self.tls.refresh, endorse, grant_endings(self.people, self.grants, self.audit, log)]
        # What the broker reads is written by the relay with the CA's key, whose list of the revoked it signs.
        if self.environment.config.uses_broker_tls and not self.forwards:
            follow.append(self.broker_access.follow)
        self.follow_ups = FollowUps(
            follow, on_bug=lambda error: log.error("a follow-up failed", exc_info=error)
        )

    def make_watcher(self, look_s: float = LOOK_S, poll_s: float = POLL_S) -> Watcher:
        """Return what applies each change of a ledger, from its ``begin`` on."""
        fleet, log, records = self.fleet, self.log, DecisionRecords(self.audit, self.log)
        names = NameDecisions(self.name_ledger, fleet, self._names_changed, log)
        leaves = LeafDecisions(
            ca=self.authority,
            fleet=fleet,
            sessions=self.node_sessions,
            notifier=self.notifier,
            retire=names.retire,
            due=self.follow_ups.due,
            record=records.add,
            log=log,
        )
        revoke = [
            part.revoke for part in (self.authenticator, self.call_gateway, self.telemetry, self.mcp_endpoint)
        ]
        applied: Mapping[StateFile, Applied[Any]] = {
            CERTIFICATES: leaves.applied(),
            REVOKED_TOKENS: token_decisions(self.revoked_tokens, revoke, records.add, log),
            VERIFYING_KEYS: token_key_decisions(
                self.token_keys, self.accepted_keys, lambda: fleet.trust.roots, records.add
            ),
            NODE_NAMES: names.applied(),
            FLEET_SEAL: seal_decisions(self.fleet_seal, self._seal),
            PEOPLE: person_decisions(self.people, self.offer_sign_in, self.follow_ups.due, records.add),
        }
        return Watcher(
            watched_files(self.ledgers, applied),
            freshness=self.freshness,
            sharing=self.sharing,
            reserve=self.reserve,
            after_poll=[self.node_sessions.end_expired, records.write],
            log=log,
            look_s=look_s,
            poll_s=poll_s,
        )

    def offer_sign_in(self, people: People) -> None:
        """Serve sign-in from the first person on, or at once with a provider, if the settings allow it.

        In a cluster once that is sealed: the relay with the CA's key answers, and the others forward to it.
        """
        environment, config = self.environment, self.environment.config
        if not (people.by_id or config.oidc) or not config.sign_in or self.signs_in:
            return
        cluster = self.cluster
        if cluster is not None and not cluster.link.is_sealed:
            self.log.error("people cannot sign in until `relay cluster seal`: relays would say their secrets")
            return
        from relay.sign_in import composition  # noqa: PLC0415 - an option, with its libraries
        from relay.sign_in.metadata import CLIENT_PATHS  # noqa: PLC0415 - as above

        url, issuers = config.public_url, [config.public_url]
        if config.external_issuer is not None:
            issuers.append(config.external_issuer.issuer)
        front = FrontPage(url, signs_in=True)
        more = [Route("/", front.show), *resource_metadata_routes(url, issuers)]
        if self.forwards and cluster is not None:
            application, paths = composition.make_forwarded_sign_in(
                environment, self.refusals, cluster.peers, more
            )
        else:
            application, paths = composition.make_sign_in(
                environment,
                people=self.people,
                grants=self.grants,
                identify=self.authenticator.identify,
                audit=self.audit,
                refusals=self.refusals,
                tenants=self._tenants,
                tags=lambda tenant: {tag for _, name in self.fleet.names.named(tenant) for tag in name.tags},
                more=more,
                fleet=None
                if cluster is None
                else composition.FleetOf(cluster.peers, cluster.ledgers, cluster.shares),
            )
        self.application.begin_sign_in(application, paths, CLIENT_PATHS, url, front.page)
        self.mcp_endpoint.methods.challenge_to = self.application.challenge_to_more
        # Last: where a file cannot be written, the next poll tries again.
        self.signs_in = True
        self.log.info("people can sign in", url=url)

    def _tenants(self) -> frozenset[str]:
        issued = self.authority.ledger.read().issued.values()
        return frozenset(each.tenant for each in issued if isinstance(each, IssuedLeaf))

    def _names_changed(self) -> None:
        """End at once what is open with nodes that a token is for no longer by their names."""
        self.telemetry.sweep()
        self.expiry.sweep_sessions()
        self.notifier.wake()

    def _seal(self) -> None:
        if self.cluster is not None:
            self.cluster.seal()
            self.offer_sign_in(self.people.read())

    def apply(self, config: RelayConfig) -> None:
        """Take from ``config`` what takes effect while the relay runs."""
        self.call_gateway.change(config.per_agent, config.envelope_mode)
        self.connections.meter.change(config.per_agent)
        self.options.change_default(config.default_view)
        self.timeouts.request = config.caller_timeout_s
        self.audit.always = config.audit_sync is AuditSync.ALWAYS
        self.audit.retain(config.audit_keep)

    # --- how it runs -----------------------------------------------------------------------------------

    def _background(self) -> Mapping[str, Background]:
        """Return what works beside the calls, by the name of its subsystem."""
        work: Mapping[str, Background | None] = {
            "refusals": self.refusals,
            "certificates": self.tls,
            "broker": self.feed,
            "inventory": self.notifier,
            "marks": self.marks,
            "cluster": self.cluster,
            "telemetry": self.telemetry,
            "telemetry elsewhere": self.telemetry_everywhere,
            "calls": self.canaries,
            "caller sessions": self.expiry,
            "decisions": self.watcher,
            "follow-ups": self.follow_ups,
        }
        return {name: part for name, part in work.items() if part is not None}

    def loops(self) -> Mapping[str, Loop]:
        """Return the loops without whose progress the relay should be restarted, by subsystem."""
        return {name: part.loop for name, part in self.background.items()}

    async def run(self) -> None:
        """Do the parts' background work until cancelled; the first that fails or ends, ends all."""
        runs: dict[str, Callable[[], Coroutine[Any, Any, None]]]
        runs = {name: part.run for name, part in self.background.items()}
        if self.own_broker is not None:
            runs["own broker"] = self.own_broker.run
        if self.external_issuer is not None:
            runs["outside issuer"] = self.external_issuer.keys.run
        async with asyncio.TaskGroup() as tasks:
            for name, run in runs.items():
                tasks.create_task(endless(name, run()))

    def health(self) -> Mapping[str, Health]:
        """Return what ``/readyz`` shows: calls can be made when all of it is ready."""
        return {
            # Calls are refused while they cannot be recorded.
            "audit": Health.passive(ready=self.audit.available),
            # A broker that has ended is told from one that is not reached.
            **({} if self.own_broker is None else {"broker_process": self.own_broker.health}),
            **({} if self.feed is None else self._health_of_broker(self.feed)),
            **({} if self.cluster is None else {"cluster": self.cluster.health()}),
            "calls": self.canaries.health(),
            "decisions": Health.of(self.watcher.loop, ready=True),
            "revocations": self.freshness.health(),
            "clock": self._health_of_clock(),
        }

    def _health_of_broker(self, feed: MqttFeed) -> Mapping[str, Health]:
        """Return whether manifests arrive by the broker, and those that it retains have arrived.

        Only at the start do calls wait for them: a broker may be full, or away, for long.
        """
        inventory, awaited = self.fleet.inventory, feed.is_awaited
        state = "" if feed.connected else "not connected: nodes announce themselves by their sessions"
        return {
            "broker": Health.of(feed.loop, ready=feed.connected, state=state, essential=awaited),
            "inventory": Health(
                started=inventory.is_subscribed,
                live=self.notifier.loop.is_live,
                ready=inventory.is_there,
                essential=awaited,
            ),
        }

    def _health_of_clock(self) -> Health:
        if self.fleet.clocks.are_ahead:
            return Health.passive(ready=False, state="behind the clocks of most nodes by more than 5 min")
        return Health.passive(ready=self.environment.clock.is_trusted())

    async def start_broker(self) -> None:
        """Start the relay's own broker, if it has one; return when it listens.

        Raises:
            BrokerStartError: it cannot be started.
            StateError, OSError: a file cannot be used.
        """
        if self.own_broker is not None:
            await self.own_broker.start(self.broker_access.write)

    async def drain(self) -> None:
        """Wait for the calls in flight as long as a call may take; end open streams and polls after that."""
        await self.executor.drain(DRAIN_S)

    async def end_calls(self) -> None:
        """End the keyed calls in flight, also those of disconnected callers, and record their outcome."""
        await self.idempotent_calls.end()
        self.access_log.close()

    async def end(self) -> None:
        """Finish pending work after the last request, and close files."""
        await self.end_calls()
        if self.cluster is not None:
            await self.cluster.close()
        if self.own_broker is not None:
            await self.own_broker.close()
        self.audit.close()
        self.reserve.close()
