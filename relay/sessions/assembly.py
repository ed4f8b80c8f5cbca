"""Assembles the nodes' sessions.

Must not decide anything: it constructs the parts and connects them.
"""

from dataclasses import dataclass

from relay.audit.assembly import AuditPart
from relay.fleet.assembly import FleetPart
from relay.part import Part
from relay.pki.assembly import PkiPart
from relay.routing.port import LocalRouter, NodeFrames
from relay.sessions.connects import ConnectLimiter, ConnectQueue
from relay.sessions.frame_handlers import FrameHandlers
from relay.sessions.handshake import Handshake
from relay.sessions.node_sessions import CapabilityLimits, NodeSessions
from relay.sessions.one_way_frames import OneWayFrames
from relay.settings.environment import RelayEnvironment
from schemas.frames import FrameReader
from schemas.tokens import DEVICE_REF, TokenVerifier


@dataclass(frozen=True, slots=True)
class SessionsPart(Part):
    """The sessions of the nodes that are connected to this process: ``router`` and ``frames`` reach them."""

    node_sessions: NodeSessions
    router: LocalRouter
    frames: NodeFrames


def assemble(environment: RelayEnvironment, audit: AuditPart, pki: PkiPart, fleet: FleetPart) -> SessionsPart:
    """Return the part."""
    config, registry = environment.config, environment.registry
    one_way = OneWayFrames(environment.metrics, environment.log)
    node_sessions = NodeSessions(
        handshake=Handshake(
            fleet.fleet,
            TokenVerifier(registry, DEVICE_REF),
            config.public_url,
            environment.random_bytes,
        ),
        fleet=fleet.fleet,
        frames=FrameHandlers(fleet.fleet, pki.renewals, environment.clock.compare, one_way),
        one_way=one_way,
        connects=ConnectQueue(ConnectLimiter(), environment.monotonic),
        reader=FrameReader(registry),
        ulids=environment.ulids,
        metrics=environment.metrics,
        refusals=audit.refusals,
        now_ms=environment.clock,
        ticks_ms=environment.ticks_ms,
        monotonic=environment.monotonic,
        log=environment.log,
    )
    router = CapabilityLimits(fleet.fleet, node_sessions, environment.monotonic)
    return SessionsPart(node_sessions, router, one_way)
