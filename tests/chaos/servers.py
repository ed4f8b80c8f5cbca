"""The nats-servers that join the relays of a site: one cluster, whose first is reached through a proxy.

Must not choose faults.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from relay.broker.nats_server import find_nats_server
from relay.cli.demo.processes import Processes
from relay.cluster.client import administering
from relay.cluster.credentials import Credentials
from relay.cluster.jetstream import make_streams
from relay.cluster.server_config import Routes, account_file, account_text, server_text
from relay.settings.config import ClusterServer
from schemas.addresses import HostPort
from tests.chaos.proxies import Proxies
from tests.chaos.topology import Link, Program, Topology
from tests.fakes.cluster_server import ACCOUNT, FLEET, NOWHERE, new_user
from tests.fakes.ports import unused_port

_STREAMS_WITHIN_S = 30.0
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
        users = [new_user(file) for file in (directory / "administrator.seed", self._seed)]
        account = account_text(ACCOUNT, FLEET, users[0], users[1:])
        (directory / account_file(ACCOUNT)).write_text(account, "utf-8")
        routes = {program: unused_port() for program in programs}
        routes[programs[0]] = proxies.route_port
        for number, program in enumerate(programs):
            # Each connects to those before it, to the first through the proxy, so that a fault can part it.
            # The first connects to none, and yet must have a route: JetStream does not start otherwise.
            before = [HostPort(_HOST, routes[other]) for other in programs[1:number]]
            before.append(HostPort(_HOST, proxies.address(Link.SERVER_SERVERS).port if number else _CLOSED))
            listen, store = HostPort(_HOST, proxies.target_port(program)), str(directory / program)
            own = Routes("edge", HostPort(_HOST, routes[program]), before, NOWHERE)
            text = server_text(program, listen, ACCOUNT, store=store, tls=False, routes=own)
            self._config(program).write_text(text, "utf-8")

    async def make_streams(self) -> None:
        """Make what the relays share, as an administrator; nothing if there are no servers."""
        if self._programs:
            listen = HostPort(_HOST, self._proxies.target_port(self._programs[0]))
            seed = (self._directory / "administrator.seed").read_text("ascii").strip()
            server = ClusterServer(listen.host, listen.port, tls=False)
            async with administering([server], Credentials(seed, None)) as client:
                await make_streams(client, FLEET, len(self._programs), _STREAMS_WITHIN_S)

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
