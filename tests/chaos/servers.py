"""The nats-servers that join the relays of a site: one cluster, whose first is reached through a proxy.

Must not choose faults.
"""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from relay.broker.nats_server import find_nats_server
from relay.cli.demo.more_relays import cluster_server_config, new_credentials
from relay.cli.demo.processes import Processes
from schemas.addresses import HostPort
from schemas.files import PRIVATE, write_atomic
from tests.chaos.proxies import Proxies
from tests.chaos.topology import Link, Program, Topology
from tests.fakes.nats_cluster import clustered
from tests.fakes.ports import unused_port

_FLEET = "main"
_HOST, _CLOSED = "127.0.0.1", 1


class Servers:
    """The servers ``programs``, none if there is one relay, with their files in ``directory``."""

    def __init__(self, directory: Path, programs: Sequence[Program], proxies: Proxies) -> None:
        self._directory = directory
        self._programs = programs
        self._proxies = proxies
        self._seed = directory / "servers.seed"
        if not programs:
            return
        seed, public_key = new_credentials(os.urandom)
        write_atomic(self._seed, seed + "\n", PRIVATE)
        routes = {program: unused_port() for program in programs}
        routes[programs[0]] = proxies.route_port
        for number, program in enumerate(programs):
            # Each connects to those before it, to the first through the proxy, so that a fault can part it.
            # The first connects to none, and yet must have a route: JetStream does not start otherwise.
            before = [HostPort(_HOST, routes[other]) for other in programs[1:number]]
            before.append(HostPort(_HOST, proxies.address(Link.SERVER_SERVERS).port if number else _CLOSED))
            listen, store = HostPort(_HOST, proxies.target_port(program)), directory / program
            alone = cluster_server_config(listen, store, public_key, _FLEET)
            text = clustered(alone, program, HostPort(_HOST, routes[program]), before)
            self._config(program).write_text(text, "utf-8")

    def options(self, relay: Program, topology: Topology) -> tuple[str, ...]:
        """Return what the command of ``relay`` has for the servers; nothing if there are none."""
        (link,) = (one.servers for one in topology.relays if one.program is relay)
        if link is None:
            return ()
        addresses = ",".join(
            f"nats://{address.host}:{address.port}" for address in self._proxies.addresses(link)
        )
        return ("--cluster", addresses, "--cluster-credentials", str(self._seed))

    async def start(self, program: Program, processes: Processes) -> None:
        """Start a server, and return when it listens."""
        server = await asyncio.to_thread(find_nats_server)
        await processes.start(program, [str(server), "-c", str(self._config(program))])
        await processes.until_listening(self._proxies.target_port(program))

    def _config(self, program: Program) -> Path:
        return self._directory / f"{program}.conf"
