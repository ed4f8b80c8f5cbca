"""Three nats-servers that are one cluster, for the relays of a test's fleet, each in a process of its own."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from relay.settings.config import ClusterConfig
from schemas.addresses import HostPort
from tests.fakes.cluster_server import NatsServer
from tests.fakes.ports import unused_port

SERVERS = 3
# A server tells its address to others, which then connect past what stands in front of it: nothing is there.
_NOWHERE = "127.0.0.1:1"
_CLUSTER = """\
cluster {{
  name: edge
  listen: {listen}
  advertise: "{nowhere}"
  routes: {routes}
}}
"""


def clustered(alone: str, name: str, listen: HostPort, routes: Sequence[HostPort]) -> str:
    """Return the configuration of a server of a cluster, from that of one ``alone``.

    It accepts the others at ``listen``, and connects to them at ``routes``.
    """
    own_name = "server_name: edge-cluster\n"
    assert own_name in alone
    urls = json.dumps([f"nats-route://{route}" for route in routes])
    block = _CLUSTER.format(listen=json.dumps(str(listen)), nowhere=_NOWHERE, routes=urls)
    return alone.replace(own_name, f"server_name: {name}\n") + block


class ClusteredServer(NatsServer):
    """One of them; ``like`` is the one whose relays are known here too, if it is not the first."""

    def __init__(self, directory: Path, route: HostPort, like: "ClusteredServer | None" = None) -> None:
        directory.mkdir()
        super().__init__(directory)
        self.route = route
        self.routes: Sequence[HostPort] = ()
        if like is not None:
            self.credentials, self.public_key = like.credentials, like.public_key

    def part(self) -> None:
        """Have it neither find the others nor be found by them, when it is started again."""
        self.route, nowhere = (HostPort("127.0.0.1", unused_port()) for _ in range(2))
        self.routes = [nowhere]

    def config_text(self) -> str:
        """Return what it is configured with."""
        return clustered(super().config_text(), self.directory.name, self.route, self.routes)


class NatsCluster:
    """The servers, with their files below ``directory``."""

    def __init__(self, directory: Path) -> None:
        self.servers: list[ClusteredServer] = []
        for number in range(SERVERS):
            first = self.servers[0] if self.servers else None
            route = HostPort("127.0.0.1", unused_port())
            self.servers.append(ClusteredServer(directory / f"nats-{number}", route, first))
        for server in self.servers:
            server.routes = [other.route for other in self.servers if other is not server]

    @property
    def config(self) -> ClusterConfig:
        """What a relay of the fleet is configured with."""
        first, *others = (server.config for server in self.servers)
        return replace(first, servers=(*first.servers, *(one for other in others for one in other.servers)))

    def start(self, count: int = SERVERS) -> None:
        """Start the first ``count``, and return when they accept connections."""
        for server in self.servers[:count]:
            server.start()

    def stop(self) -> None:
        """End all."""
        for server in self.servers:
            server.stop()
