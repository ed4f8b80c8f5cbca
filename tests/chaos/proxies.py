"""The proxies of a site, by link: one, or several that are disturbed together. Must not choose faults."""

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager

from schemas.addresses import BrokerAddress
from tests.chaos.topology import Link, Program, Topology
from tests.fakes.fault_proxy import FaultProxy, LinkFault
from tests.fakes.ports import unused_port


class Proxies:
    """What is in front of each part. Use ``running``.

    Attributes:
        route_port: where the first of the servers that join relays accepts the others.
    """

    def __init__(self, topology: Topology) -> None:
        programs = (Program.BROKER, *topology.servers, *(relay.program for relay in topology.relays))
        self._ports = {program: unused_port() for program in programs}
        self.route_port = unused_port()
        self._of: dict[Link, list[FaultProxy]] = {
            link: [FaultProxy(BrokerAddress("127.0.0.1", port)) for port in ports]
            for link, ports in self._targets(topology)
        }

    @classmethod
    @asynccontextmanager
    async def running(cls, topology: Topology) -> AsyncIterator["Proxies"]:
        """Hold the proxies, which pass bytes on."""
        proxies = cls(topology)
        async with AsyncExitStack() as stack:
            for group in proxies._of.values():
                for proxy in group:
                    await stack.enter_async_context(proxy.running())
            yield proxies

    def target_port(self, program: Program) -> int:
        """Return the port on which a program listens."""
        return self._ports[program]

    def address(self, link: Link) -> BrokerAddress:
        """Return where the one proxy of a link listens."""
        (address,) = self.addresses(link)
        return address

    def addresses(self, link: Link) -> list[BrokerAddress]:
        """Return where the proxies of a link listen."""
        return [proxy.address for proxy in self.of(link)]

    def of(self, link: Link) -> list[FaultProxy]:
        """Return the proxies of a link: one, or of a relay and the servers one for each server."""
        return self._of[link]

    @asynccontextmanager
    async def disturbed(self, link: Link, kind: LinkFault, which: int | None = None) -> AsyncIterator[None]:
        """Have a fault on all connections of a link, or on one of each proxy, until the end of the block."""
        begun = [(proxy, proxy.begin(kind, which)) for proxy in self._of[link]]
        try:
            yield
        finally:
            for proxy, number in begun:
                proxy.end(number)

    def _targets(self, topology: Topology) -> Iterator[tuple[Link, list[int]]]:
        broker = self._ports[Program.BROKER]
        yield Link.NODE_BROKER, [broker]
        yield Link.RELAY_BROKER, [broker]
        for relay in topology.relays:
            yield relay.agents, [self._ports[relay.program]]
            yield relay.nodes, [self._ports[relay.program]]
            if relay.servers is not None:
                yield relay.servers, [self._ports[server] for server in topology.servers]
        if topology.staying is not None:
            yield topology.staying.link, [self._ports[topology.staying.relay]]
        if topology.servers:
            yield Link.SERVER_SERVERS, [self.route_port]
