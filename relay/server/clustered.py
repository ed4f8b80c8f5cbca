"""Joins this relay to the others of its fleet. Without a cluster it must not import anything of that."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from relay.calls.idempotency import IdempotencyStore, KeyedCommands
from relay.fleet.fleet import Fleet
from relay.part import Part
from relay.pki.assembly import PkiPart
from relay.routing.peers import Peers
from relay.routing.port import NodeFrames, NodeRouter
from relay.sessions.assembly import SessionsPart
from relay.settings.environment import RelayEnvironment
from relay.state.merging import SharedLedger
from relay.state.sharer import NotShared, Sharing
from relay.state.watcher import DescriptorReserve, LedgerThreads
from schemas.error_roots import OperatorError


class ClusterExtraError(OperatorError):
    """The library of NATS is not installed."""


@dataclass(frozen=True, slots=True)
class Joined:
    """What this relay is joined by, if it has others beside it.

    Attributes:
        router, frames: reach the nodes, of all relays or of this one alone.
        peers: the other relays; None without a cluster.
    """

    router: NodeRouter
    frames: NodeFrames
    peers: Peers | None
    part: Part
    sharing: Sharing

    @property
    def relay_of(self) -> Callable[[str], str | None] | None:
        """What tells which of several relays a node is connected to; None without a cluster."""
        return None if self.peers is None else self.peers.relay_of


def joined(  # noqa: PLR0913, PLR0917 - the parts that it joins
    environment: RelayEnvironment,
    sessions: SessionsPart,
    fleet: Fleet,
    pki: PkiPart,
    ledgers: Sequence[SharedLedger],
    reserve: DescriptorReserve,
) -> Joined:
    """Join the relay to the others of its fleet, if there are any.

    ``ledgers`` are what all of them must know; they are read and written with ``reserve``.

    Raises:
        ClusterExtraError: the extra is not installed.
        CredentialsError, OSError: the credentials cannot be used.
    """
    config = environment.config.cluster
    if config is None:
        return Joined(sessions.router, sessions.frames, None, Part(), NotShared())
    try:
        from relay.cluster import assembly  # noqa: PLC0415 - the library of NATS, for a cluster alone
        from relay.cluster.presence import Effects  # noqa: PLC0415 - as above
    except ModuleNotFoundError:
        raise ClusterExtraError("--cluster needs the extra: pip install 'edge-kubelet[cluster]'") from None
    keyed = KeyedCommands(
        sessions.router, IdempotencyStore[str](environment.monotonic), environment.monotonic
    )
    effects = Effects(
        sessions.node_sessions.end_superseded,
        fleet.show_connected_elsewhere,
        keyed.moved,
        keyed.history_unknown,
    )

    def roots() -> Sequence[str]:
        return fleet.trust.root_kids()  # of the trust of this moment: a change replaces it

    part = assembly.assemble(
        environment,
        config,
        local=keyed,
        frames=sessions.frames,
        effects=effects,
        tenant_of=fleet.tenant_of,
        ledgers=ledgers,
        on_thread=LedgerThreads(reserve, 1, "shared").run,
        authority=pki.service,
        roots=roots,
    )
    pki.elsewhere.connect(part.authority)
    pki.counted_uses.connect(part.ledgers)
    return Joined(part.router, part.frames, part.peers, part, part.ledgers)
