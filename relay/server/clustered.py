"""Joins this relay to the others of its fleet. Without a cluster it must not import anything of that."""

from relay.calls.idempotency_store import IdempotencyStore
from relay.calls.keyed_commands import KeyedCommands
from relay.environment import RelayEnvironment
from relay.fleet.fleet import Fleet
from relay.part import Part
from relay.routing.port import NodeRouter
from relay.sessions.assembly import SessionsPart
from schemas.error_roots import OperatorError


class ClusterExtraError(OperatorError):
    """The library of NATS is not installed."""


def routed(environment: RelayEnvironment, sessions: SessionsPart, fleet: Fleet) -> tuple[NodeRouter, Part]:
    """Return what reaches the nodes, of all relays or of this one alone, and the part that it belongs to.

    Raises:
        ClusterExtraError: the extra is not installed.
        CredentialsError, OSError: the credentials cannot be used.
    """
    config = environment.config.cluster
    if config is None:
        return sessions.router, Part()
    try:
        from relay.cluster import assembly, presence  # noqa: PLC0415 - the library of NATS, for a cluster alone
    except ModuleNotFoundError:
        raise ClusterExtraError("--cluster needs the extra: pip install 'edge-kubelet[cluster]'") from None
    keyed = KeyedCommands(
        sessions.router, IdempotencyStore[str](environment.monotonic), environment.monotonic
    )

    def show(node_id: str, connected: bool) -> bool:  # noqa: FBT001 - as ``Effects`` has it
        known = fleet.knows(node_id)
        if known:
            fleet.set_connected(node_id, connected=connected)
        return known

    effects = presence.Effects(sessions.node_sessions.let_go, show, keyed.moved)
    part = assembly.assemble(environment, config, local=keyed, frames=sessions.frames, effects=effects)
    return part.router, part
