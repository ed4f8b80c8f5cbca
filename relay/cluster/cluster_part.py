"""This relay in its cluster, as the relay runs, closes and shows it. Must not make its parts."""

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from relay.cluster.authority_answerer import AuthorityAnswerer
from relay.cluster.authority_asker import AuthorityAsker
from relay.cluster.command_owner import CommandOwner
from relay.cluster.connection import ClusterConnection
from relay.cluster.fleet_frames import FleetFrames
from relay.cluster.presence import Presence
from relay.cluster.presence_bucket import PresenceBucket
from relay.cluster.relay_peers import RelayPeers
from relay.part import Part
from relay.routing.cluster_messages import ClusterMessages
from relay.routing.port import NodeRouter
from relay.state.sharer import Sharer
from schemas.health import Health, Loop
from schemas.text import counted


@dataclass(frozen=True, slots=True)
class ClusterPart(Part):
    """This relay in its cluster.

    Attributes:
        connection: the one to NATS; what else is to use it registers a work there.
        presence: which relay each node is connected to.
        bucket: what it is read from, and written to.
        ledgers: what all relays must know of the operator's decisions.
        router, frames: reach the nodes of all relays.
        peers: the other relays.
        authority: asks the relay that has the CA's key.
        answerer: answers those that do not; None where this relay does not have it.
    """

    connection: ClusterConnection
    messages: ClusterMessages
    owner: CommandOwner
    presence: Presence
    bucket: PresenceBucket
    ledgers: Sharer
    router: NodeRouter
    frames: FleetFrames
    peers: RelayPeers
    authority: AuthorityAsker
    answerer: AuthorityAnswerer | None

    async def run(self) -> None:
        """Keep up the connection, and the lists without one, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.connection.run())
            tasks.create_task(self.bucket.keep_lists())

    async def close(self) -> None:
        """End the commands and questions of other relays that are in flight, and what waits for them."""
        await self.owner.close()
        if self.answerer is not None:
            await self.answerer.close()
        await self.peers.close()
        await self.frames.close()

    def health(self) -> Mapping[str, Health]:
        """Nodes of other relays can be reached; without that, calls of this relay's own nodes flow on."""
        ready = self.connection.is_connected and self.presence.is_current and self.ledgers.is_current
        return {"cluster": Health.of(self.connection.loop, ready=ready, state=self._state(), essential=False)}

    def loops(self) -> Mapping[str, Loop]:
        """The connection is made again."""
        return {"cluster": self.connection.loop}

    def status(self) -> Mapping[str, Any]:
        """Return this relay's id, the other relays that run, and how many nodes each of them has."""
        return {"relay": self.peers.relay, "others": [asdict(each) for each in self.presence.other_relays()]}

    def _state(self) -> str:
        if not self.connection.is_connected:
            problem = self.connection.problem or "not tried yet"
            return f"not connected; only this relay's own nodes can be called: {problem}"
        if not self.ledgers.is_current:
            problem = self.ledgers.problem or "not read yet"
            return (
                f"connected to {self.connection.server}: "
                f"revocations and names of other relays are not up to date: {problem}"
            )
        if not self.presence.is_current:
            return f"connected to {self.connection.server}: only this relay's own nodes are listed"
        relays = counted(self.presence.relays(), "relay")
        nodes = counted(self.presence.nodes_elsewhere(), "node")
        return f"connected to {self.connection.server}: {relays}, {nodes} at others"
