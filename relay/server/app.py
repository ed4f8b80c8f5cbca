"""The relay's composition root: the one place where its parts meet.

Each package assembles itself (``relay.*.assembly``); here they are connected, run and closed. Must not
contain behaviour of its own.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from relay.audit import assembly as audit_assembly
from relay.auth import assembly as auth_assembly
from relay.broker import assembly as broker_assembly
from relay.calls import assembly as calls_assembly
from relay.fleet import assembly as fleet_assembly
from relay.fleet.leaves import FleetTrust
from relay.http import assembly as http_assembly
from relay.mcp_api import assembly as mcp_assembly
from relay.observability.node_labels import with_labels
from relay.part import Part
from relay.pki import assembly as pki_assembly
from relay.server.clustered import joined
from relay.server.decision_records import DecisionRecords
from relay.server.decisions import (
    LeafDecisions,
    NameDecisions,
    token_decisions,
    token_key_decisions,
    watched,
)
from relay.server.follow_ups import FollowUps
from relay.sessions import assembly as sessions_assembly
from relay.settings.config import RelayConfig
from relay.settings.environment import RelayEnvironment
from relay.state.kinds import (
    CERTIFICATES,
    JOIN_TOKENS,
    NODE_NAMES,
    REVOKED_TOKENS,
    VERIFYING_KEYS,
    StateFile,
    files_of,
    shared_ledgers,
    watched_names,
)
from relay.state.ledger import Ledger
from relay.state.merging import Merging, SharedLedger
from relay.state.names import NameLedger
from relay.state.sharer import Sharing
from relay.state.watcher import SHARED, DescriptorReserve, Freshness, Watcher
from relay.streams.caller_tools import assembly as caller_tools_assembly
from relay.streams.telemetry import assembly as telemetry_assembly
from schemas.health import Health, Loop, endless
from schemas.trust import TrustRules


class Relay:
    """The parts of one relay, connected.

    Raises:
        AuthorityStateError: there is no CA.
        ExposedFileError: others can read the token key.
        OSError: the state directory cannot be used.
    """

    def __init__(self, environment: RelayEnvironment) -> None:
        self._clock = environment.clock
        self._state = environment.config.state.root
        self._freshness = Freshness((*watched_names(), SHARED), environment.monotonic)
        environment.metrics.watch_health(self.health)
        authority = pki_assembly.open_authority(environment)
        name_ledger = NameLedger(environment.config.state.node_names, environment.now_ms)
        self.audit = audit_assembly.assemble(environment)
        self.broker = broker_assembly.assemble(environment)
        name_node = name_ledger.name_new
        self.pki = pki_assembly.assemble(environment, authority, self.audit, name_node, self.broker)
        environment.metrics.watch_certificates(self.pki.expiries.names, self.pki.expiries.end_ms)
        trust = FleetTrust(
            TrustRules(environment.registry, environment.kinds),
            [authority.root_pem()],
            authority.revoked_kids(),
        )
        self.auth = auth_assembly.assemble(environment, authority)
        self.fleet = fleet_assembly.assemble(
            environment, self.audit, trust, self.pki.tls.to_broker, name_ledger
        )
        environment = replace(environment, log=with_labels(environment.log, self.fleet.fleet.names.label_of))
        self.sessions = sessions_assembly.assemble(environment, self.audit, self.pki, self.fleet)
        reserve = DescriptorReserve()
        ledgers = self._shared_ledgers(environment)
        cluster = joined(environment, self.sessions, self.fleet.fleet, self.pki, ledgers, reserve)
        self.cluster = cluster.part
        self.telemetry = telemetry_assembly.assemble(
            environment,
            audit=self.audit,
            auth=self.auth,
            fleet=self.fleet,
            frames=cluster.frames,
            peers=cluster.peers,
        )
        self.calls = calls_assembly.assemble(
            environment,
            audit=self.audit,
            auth=self.auth,
            fleet=self.fleet,
            router=cluster.router,
            frames=self.sessions.frames,
            streams=self.telemetry.hub,
            revocations_known=self._freshness.is_fresh,
        )
        measurements = mcp_assembly.assemble_views(environment, self.fleet, self.calls)
        self.telemetry.hub.on_sample(measurements.keep)
        self.caller_tools = caller_tools_assembly.assemble(
            environment,
            audit=self.audit,
            auth=self.auth,
            fleet=self.fleet,
            frames=cluster.frames,
            calls=self.calls,
            peers=cluster.peers,
        )
        self.mcp = mcp_assembly.assemble(
            environment,
            self.auth,
            self.fleet,
            self.calls,
            self.telemetry,
            self.caller_tools.streams,
            cluster.relay_of,
        )
        self.follow_ups = self._follow_ups(environment)
        self.watcher = self._watcher(environment, reserve, cluster.sharing)
        self.watcher.begin()
        self.http = http_assembly.assemble(
            environment,
            self.audit,
            self.auth,
            http_assembly.Served(
                mcp=self.mcp.endpoint,
                mcp_direct=self.mcp.endpoint.begin,
                running=self.mcp.endpoint.running,
                node_sessions=self.sessions.node_sessions,
                routes=self.pki.enrolment.routes(),
                health=self.health,
            ),
        )

    @property
    def parts(self) -> tuple[Part, ...]:
        """The packages' parts, in the order in which they are built; they are closed in reverse."""
        return (
            self.audit,
            self.broker,
            self.pki,
            self.auth,
            self.fleet,
            self.sessions,
            self.cluster,
            self.telemetry,
            self.calls,
            self.caller_tools,
            self.mcp,
            self.http,
        )

    def health(self) -> Mapping[str, Health]:
        """Return what ``/readyz`` shows: calls can be made when all of it is ready."""
        parts = {name: health for part in self.parts for name, health in part.health().items()}
        return parts | {
            "decisions": Health.of(self.watcher.loop, ready=True),
            "revocations": self._freshness.health(),
            "clock": self._clock_health(),
        }

    def _clock_health(self) -> Health:
        if self.fleet.fleet.clocks.are_ahead:
            return Health.passive(ready=False, state="behind the clocks of most nodes by more than 5 min")
        return Health.passive(ready=self._clock.is_trusted())

    def loops(self) -> Mapping[str, Loop]:
        """Return the loops without whose progress the relay should be restarted, by subsystem."""
        parts = {name: loop for part in self.parts for name, loop in part.loops().items()}
        return parts | {"decisions": self.watcher.loop, "follow-ups": self.follow_ups.loop}

    def apply(self, config: RelayConfig) -> None:
        """Take from ``config`` what can be changed while the relay runs."""
        self.calls.gateway.change(config.per_agent, config.envelope_mode)
        self.mcp.options.change_default(config.default_view)
        self.caller_tools.timeouts.request = config.caller_timeout_s

    async def run(self) -> None:
        """Do the parts' background work until cancelled; the first that fails or ends, ends all."""
        async with asyncio.TaskGroup() as tasks:
            for part in self.parts:
                tasks.create_task(endless(type(part).__name__, part.run()))
            tasks.create_task(endless("decisions", self.watcher.run()))
            tasks.create_task(endless("follow-ups", self.follow_ups.run()))

    async def drain(self) -> None:
        """Wait for the calls in flight, and answer those that last too long."""
        await self.calls.drain()

    async def close(self) -> None:
        """Close the parts, the audit last."""
        for part in reversed(self.parts):
            await part.close()

    def _ledgers(self) -> Mapping[StateFile, Ledger[Any]]:
        """Return the files of the operator's decisions that this relay reads."""
        root = self._state
        return {file: file.ledger(root) for file in files_of()} | {
            CERTIFICATES: self.pki.authority.ledger,
            REVOKED_TOKENS: self.auth.revoked_tokens.ledger,
            JOIN_TOKENS: self.pki.join_tokens.ledger,
            VERIFYING_KEYS: self.auth.token_keys.ledger,
            NODE_NAMES: self.fleet.name_ledger.ledger,
        }

    def _shared_ledgers(self, environment: RelayEnvironment) -> Sequence[SharedLedger]:
        """Return what all relays of a fleet must know of the operator's decisions."""
        auth, pki = self.auth, self.pki
        merging = Merging(
            environment.now_ms,
            environment.log,
            issues=pki.authority.can_issue(),
            is_endorsed={"token_key": auth.token_keys.is_endorsed},
            refused=lambda kind: environment.metrics.cluster_entries.labels(kind, "not_endorsed").inc(),
        )
        return shared_ledgers(self._ledgers(), merging)

    def _watcher(
        self, environment: RelayEnvironment, reserve: DescriptorReserve, sharing: Sharing
    ) -> Watcher:
        """Return what applies the operator's decisions."""
        log, fleet = environment.log, self.fleet.fleet
        records = DecisionRecords(self.audit.log, log)
        names = NameDecisions(self.fleet.name_ledger, fleet, log)
        leaves = LeafDecisions(
            ca=self.pki.authority,
            fleet=fleet,
            sessions=self.sessions.node_sessions,
            notifier=self.fleet.notifier,
            retire=names.retire,
            due=self.follow_ups.due,
            record=records.add,
            log=log,
        )
        revoke = [
            self.auth.authenticator.revoke,
            self.calls.gateway.revoke,
            self.telemetry.hub.revoke,
            self.mcp.endpoint.revoke,
        ]
        auth = self.auth
        return Watcher(
            watched(
                self._ledgers(),
                {
                    CERTIFICATES: leaves.applied(),
                    REVOKED_TOKENS: token_decisions(auth.revoked_tokens, revoke, records.add, log),
                    VERIFYING_KEYS: token_key_decisions(
                        auth.token_keys, auth.accepted_keys, lambda: fleet.trust.roots, records.add
                    ),
                    NODE_NAMES: names.applied(),
                },
            ),
            freshness=self._freshness,
            sharing=sharing,
            reserve=reserve,
            after_poll=[self.sessions.node_sessions.end_expired, records.write],
            log=log,
        )

    def _follow_ups(self, environment: RelayEnvironment) -> FollowUps:
        """Return the work after each change of certificates or roots."""
        follow, log = [self.pki.tls.refresh, self.auth.key_endorsement.follow], environment.log
        # What the broker reads is written by the relay with the CA's key, whose list of the revoked it signs.
        if environment.config.uses_broker_tls and self.pki.service is not None:
            follow.append(self.pki.broker_access.follow)
        return FollowUps(follow, on_bug=lambda error: log.error("a follow-up failed", exc_info=error))
