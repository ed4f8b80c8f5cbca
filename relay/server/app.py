"""The relay's composition root: the one place where its parts meet the clock, the disk and the network.

Must not hold behaviour of its own.
"""

import asyncio
import os
import resource
import socket
import time
from collections.abc import Mapping
from importlib.metadata import version
from typing import TextIO

from structlog.typing import FilteringBoundLogger

from relay.audit.log import AuditLog
from relay.audit.refusal_counts import RefusalCounter
from relay.auth.agent_tokens import Authenticator, ExternalIssuer, key_id, load_or_create_token_key
from relay.auth.issuer_keys import IssuerKeys, JwksReader, JwksSource
from relay.auth.revoked_tokens import RevokedTokens
from relay.calls.access_log import AccessLog
from relay.calls.call_record import CallAnswer
from relay.calls.envelope import EnvelopeCheck
from relay.calls.executor import CallExecutor
from relay.calls.gateway import CallGateway
from relay.calls.idempotency_store import IdempotencyStore
from relay.calls.idempotent_calls import IdempotentCalls
from relay.clock import RelayClock, now_ms, ticks_ms
from relay.config import OutsideIssuer, RelayConfig
from relay.fleet.change_notifier import ChangeNotifier
from relay.fleet.fleet import Fleet, Trust
from relay.fleet.mqtt_feed import MqttFeed
from relay.fleet.replay_marks import MarkStore
from relay.fleet.tools import Projector
from relay.http.connections import Bounds, Connections
from relay.http.listener import serve
from relay.http.request_guard import AllowedHosts, RequestGuard
from relay.http.routes import make_routes
from relay.mcp_api.endpoint import McpEndpoint
from relay.mcp_api.open_streams import OpenStreams
from relay.mcp_api.resources import ResourceCatalog
from relay.observability.logging import last_words, opened
from relay.observability.metrics import Metrics
from relay.pki.authority import CertificateAuthority
from relay.pki.broker_access import BrokerAccess
from relay.pki.enrolment_endpoint import EnrolmentEndpoint, EnrolmentInfo
from relay.pki.join_tokens import JoinTokens
from relay.pki.renewals import Renewals
from relay.pki.tls_contexts import RelayTls
from relay.server.collector import calm_collector
from relay.server.descriptor_reserve import DescriptorReserve
from relay.server.follow_ups import FollowUps
from relay.server.ledger_freshness import Freshness
from relay.server.trust_watcher import LEAVES, TOKENS, TrustWatcher
from relay.sessions.connect_limiter import ConnectLimiter
from relay.sessions.frame_handlers import FrameHandlers
from relay.sessions.handshake import Admission
from relay.sessions.node_sessions import NodeSessions
from schemas.addresses import mcp_url
from schemas.frames import FrameReader
from schemas.kinds import KindRegistry
from schemas.lines import LineWriter
from schemas.registry import SchemaRegistry
from schemas.tokens import AGENT_REF, DEVICE_REF, EXTERNAL_AGENT_REF, EXTERNAL_HEADER_REF, TokenVerifier
from schemas.trust import TrustRules
from schemas.ulids import UlidSource


class Relay:
    """The parts of one relay, put together.

    ``lines`` is where the lines of calls go. ``registry`` and ``kinds`` are the documents and kinds that it
    knows, by default those that ship.

    Raises:
        AuthorityError: there is no CA.
        ExposedFileError: others can read the token key.
        OSError: the state directory cannot be used.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - what comes in from outside
        self,
        config: RelayConfig,
        log: FilteringBoundLogger,
        lines: LineWriter,
        metrics: Metrics,
        registry: SchemaRegistry | None = None,
        kinds: KindRegistry | None = None,
    ) -> None:
        registry, kinds = registry or SchemaRegistry(), kinds or KindRegistry()
        ulids = UlidSource(now_ms, os.urandom)
        self.clock = RelayClock(now_ms, ticks_ms, log)
        state = config.state
        ca = CertificateAuthority(state.ca, now_ms, os.urandom)
        # First of all, for this error says what to do.
        trust = Trust(TrustRules(registry, kinds), [ca.root_pem()], ca.revoked_kids())
        self.tls = RelayTls(config, ca, now_ms=now_ms, random_bytes=os.urandom, log=log)
        broker_access = BrokerAccess(ca, config.broker_directory or state.broker, config.broker_pid_file, log)
        self.marks = MarkStore(state.marks)
        self.audit = AuditLog(state.audit, now_ms)
        self.refusals = RefusalCounter(self.audit, log, time.monotonic)
        fleet = Fleet(
            trust=trust,
            projector=Projector(registry, kinds),
            marks=self.marks,
            metrics=metrics,
            refusals=self.refusals,
            now_ms=self.clock,
            log=log,
        )
        token_key = bytes(load_or_create_token_key(state.token_key).verify_key)
        token_keys = {key_id(token_key): token_key}
        named = config.outside
        self.outside = _outside(named, token_keys, registry, metrics, log) if named else None
        authenticator = Authenticator(
            TokenVerifier(registry, AGENT_REF),
            token_keys,
            issuer=config.public_url,
            audience=mcp_url(config.public_url),
            now_ms=self.clock,
            outside=self.outside,
        )
        device_tokens = TokenVerifier(registry, DEVICE_REF)
        sessions = NodeSessions(
            admission=Admission(fleet, device_tokens, config.public_url, os.urandom),
            fleet=fleet,
            frames=FrameHandlers(fleet, Renewals(ca, self.audit, now_ms, log), self.clock.compare),
            connect_limiter=ConnectLimiter(),
            reader=FrameReader(registry),
            ulids=ulids,
            metrics=metrics,
            refusals=self.refusals,
            now_ms=self.clock,
            ticks_ms=ticks_ms,
            monotonic=time.monotonic,
            log=log,
        )
        freshness = Freshness((LEAVES, TOKENS), time.monotonic)
        runner = CallExecutor(sessions, self.audit, time.monotonic, os.urandom, log)
        self.once = IdempotentCalls(runner, IdempotencyStore[CallAnswer](time.monotonic), self.audit, log)
        gateway = CallGateway(
            authenticator=authenticator,
            envelopes=EnvelopeCheck(registry, config.envelope_mode, log),
            fleet=fleet,
            runner=runner,
            once=self.once,
            audit=self.audit,
            refusals=self.refusals,
            metrics=metrics,
            call_log=AccessLog(lines),
            ulids=ulids,
            per_agent=config.per_agent,
            revocations_known=freshness.is_fresh,
            now_ms=now_ms,
            monotonic=time.monotonic,
            log=log,
        )
        self.notifier = ChangeNotifier(fleet, log)
        self.discovery = MqttFeed(
            broker=config.broker,
            # Not the process id: in containers that is often 1, and a broker keeps one of two alike.
            client_id=f"edge-relay-{os.urandom(4).hex()}",
            fleet=fleet,
            registry=registry,
            metrics=metrics,
            refusals=self.refusals,
            log=log,
            tls=self.tls.to_broker,
        )
        mcp = McpEndpoint(
            version=version("edge-kubelet"),
            gateway=gateway,
            fleet=fleet,
            authenticator=authenticator,
            notifier=self.notifier,
            resources=ResourceCatalog(fleet, registry),
            streams=OpenStreams(),
            now_ms=self.clock,
        )
        self.watch = TrustWatcher(
            ca=ca,
            tokens=RevokedTokens(state.revoked_tokens),
            fleet=fleet,
            sessions=sessions,
            notifier=self.notifier,
            audit=self.audit,
            follow_ups=FollowUps(
                [self.tls.refresh, *([broker_access.follow] if config.broker.tls else [])],
                on_bug=lambda error: log.error("a change was not followed", exc_info=error),
            ),
            freshness=freshness,
            reserve=DescriptorReserve(),
            on_tokens=[authenticator.revoke, gateway.revoke, mcp.revoke],
            now_ms=self.clock,
            log=log,
        )
        self.watch.begin()
        enrolment = EnrolmentEndpoint(
            ca=ca,
            join_tokens=JoinTokens(state.join_tokens, now_ms, os.urandom),
            registry=registry,
            told=EnrolmentInfo(config.public_url, config.node_broker or config.broker, config.own_root),
            refusals=self.refusals,
            audit=self.audit,
            log=log,
            now_ms=now_ms,
        )
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.connections = Connections(Bounds.below(descriptors), metrics.connections_refused)
        self.application = RequestGuard(
            allowed=AllowedHosts.of(config.public_url, config.listen, tls=config.tls is not None),
            authenticator=authenticator,
            public_url=config.public_url,
            metrics=metrics,
            refusals=self.refusals,
            mcp=mcp,
            node_sessions=sessions,
            other=make_routes(
                public_url=config.public_url,
                registry=registry,
                metrics=metrics,
                readiness=lambda: {
                    "broker": self.discovery.connected,
                    "audit": self.audit.available,
                    "revocations": freshness.is_fresh(),
                    "clock": self.clock.is_trusted(),
                },
                running=mcp.running,
                issuers=[named.issuer] if named else [],
                more=enrolment.routes(),
            ),
        )


def _outside(
    named: OutsideIssuer,
    ours: Mapping[str, bytes],
    registry: SchemaRegistry,
    metrics: Metrics,
    log: FilteringBoundLogger,
) -> ExternalIssuer:
    """Return the issuer that the operator named besides the relay, whose own keys are ``ours``."""
    keys = IssuerKeys(
        fetch=JwksSource(named.jwks_url).fetch,
        read=JwksReader(registry, ours).keys,
        monotonic=time.monotonic,
        metrics=metrics,
        log=log,
    )
    return ExternalIssuer(
        named.issuer, TokenVerifier(registry, EXTERNAL_AGENT_REF, EXTERNAL_HEADER_REF), keys
    )


async def run_relay(
    config: RelayConfig,
    listener: socket.socket,
    stream: TextIO,
    registry: SchemaRegistry | None = None,
    kinds: KindRegistry | None = None,
) -> None:
    """Serve on ``listener``, which is bound, until cancelled. ``registry`` and ``kinds`` are ``Relay``'s.

    Raises:
        AuthorityError, ExposedFileError, OSError: as ``Relay``.
        FailedError: it has ended by itself.
    """
    metrics = Metrics()
    with opened(stream, on_fault=metrics.fault, on_lost=metrics.log_lines_lost.inc) as (log, lines):
        relay = Relay(config, log, lines, metrics, registry, kinds)
        with last_words(log):
            await _serve(relay, config, listener, log)


async def _serve(
    relay: Relay, config: RelayConfig, listener: socket.socket, log: FilteringBoundLogger
) -> None:
    calm_collector()
    log.info(
        "relay started",
        url=config.public_url,
        listen=str(config.listen),
        broker=str(config.broker),
        audit_head=relay.audit.head,
    )
    try:
        async with asyncio.TaskGroup() as tasks:
            parts = (relay.marks, relay.refusals, relay.notifier, relay.discovery, relay.tls, relay.watch)
            background = [tasks.create_task(part.run()) for part in parts]
            if relay.outside is not None:
                background.append(tasks.create_task(relay.outside.keys.run()))
            try:
                await serve(relay.application, listener, relay.connections, relay.tls.served)
            finally:
                for task in background:
                    task.cancel()
    finally:
        await relay.once.end()
        log.info("relay ended", audit_head=relay.audit.head)
        relay.audit.close()
