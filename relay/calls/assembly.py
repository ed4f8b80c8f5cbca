"""Assembles the call gateway over a ``NodeRouter``.

Must not decide anything: it constructs the parts and connects them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from relay.audit.assembly import AuditPart
from relay.auth.assembly import AuthPart
from relay.calls.access_log import AccessLog
from relay.calls.call_record import CallAnswer, SampleStreams
from relay.calls.canaries import Canaries
from relay.calls.envelope import EnvelopeCheck
from relay.calls.executor import CallExecutor
from relay.calls.gateway import CallGateway
from relay.calls.idempotency import IdempotencyStore, IdempotentCalls
from relay.calls.relay_tools import RelayTools
from relay.fleet.assembly import FleetPart
from relay.part import Part
from relay.routing.port import NodeFrames, NodeRouter
from relay.settings.environment import RelayEnvironment
from schemas.delivery import CALL_BUDGET_MS
from schemas.health import Health, Loop

DRAIN_S = CALL_BUDGET_MS / 1000 + 0.5
"""How long the calls in flight are waited for at the end."""


@dataclass(frozen=True, slots=True)
class CallsPart(Part):
    """The calls of all agents.

    Attributes:
        relay_tools: where the packages above register the tools that they answer.
    """

    gateway: CallGateway
    executor: CallExecutor
    relay_tools: RelayTools
    idempotent_calls: IdempotentCalls
    canaries: Canaries
    access_log: AccessLog

    async def run(self) -> None:
        await self.canaries.run()

    def health(self) -> Mapping[str, Health]:
        return {"calls": self.canaries.health()}

    def loops(self) -> Mapping[str, Loop]:
        """Without the canaries it is not known whether calls flow."""
        return {"calls": self.canaries.loop}

    async def drain(self) -> None:
        """Wait for the calls in flight as long as a call may take; end open streams and polls after that."""
        await self.executor.drain(DRAIN_S)

    async def close(self) -> None:
        """End the keyed calls in flight, also those of disconnected callers, and record their outcome."""
        await self.idempotent_calls.end()
        self.access_log.close()


def assemble(  # noqa: PLR0913 - the parts that it connects
    environment: RelayEnvironment,
    *,
    audit: AuditPart,
    auth: AuthPart,
    fleet: FleetPart,
    router: NodeRouter,
    frames: NodeFrames,
    streams: SampleStreams,
    revocations_known: Callable[[], bool],
) -> CallsPart:
    """Return the part, which sends commands by ``router`` and starts ``streams``.

    It learns by ``frames`` which nodes are connected. Without ``revocations_known`` it refuses calls.
    """
    config, monotonic, log = environment.config, environment.monotonic, environment.log
    relay_tools = RelayTools()
    access_log = AccessLog(environment.lines)
    executor = CallExecutor(router, streams, audit.log, monotonic, environment.random_bytes, log)
    idempotent_calls = IdempotentCalls(executor, IdempotencyStore[CallAnswer](monotonic), audit.log, log)
    gateway = CallGateway(
        authenticator=auth.authenticator,
        envelopes=EnvelopeCheck(environment.registry, config.envelope_mode, log),
        fleet=fleet.fleet,
        relay_tools=relay_tools,
        streams=streams,
        executor=executor,
        idempotent_calls=idempotent_calls,
        audit=audit.log,
        refusals=audit.refusals,
        metrics=environment.metrics,
        access_log=access_log,
        ulids=environment.ulids,
        per_agent=config.per_agent,
        revocations_known=revocations_known,
        now_ms=environment.now_ms,
        monotonic=monotonic,
        log=log,
        spans=environment.spans,
    )
    canaries = Canaries(
        fleet=fleet.fleet,
        executor=executor,
        audit=audit.log,
        ulids=environment.ulids,
        metrics=environment.metrics,
        monotonic=monotonic,
        log=log,
    )
    frames.on_connection(canaries.connection_changed)
    frames.on_announce(canaries.announced)
    return CallsPart(gateway, executor, relay_tools, idempotent_calls, canaries, access_log)
