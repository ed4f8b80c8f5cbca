"""What a site consists of: one relay, or three that NATS joins; and how often each part is disturbed.

Must not do anything: ``site.py`` starts the parts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from tests.fakes.fault_proxy import LinkFault


class Link(StrEnum):
    """A way between two parts, through a proxy."""

    AGENT_RELAY = "agent-relay"
    AGENT_RELAY_2 = "agent-relay-2"
    AGENT_RELAY_3 = "agent-relay-3"
    NODE_RELAY = "node-relay"
    NODE_RELAY_2 = "node-relay-2"
    NODE_RELAY_3 = "node-relay-3"
    STAYING_RELAY_3 = "staying-relay-3"
    """Of the nodes that stay where they are."""
    NODE_BROKER = "node-broker"
    RELAY_BROKER = "relay-broker"
    RELAY_SERVERS = "relay-servers"
    RELAY_2_SERVERS = "relay-2-servers"
    RELAY_3_SERVERS = "relay-3-servers"
    SERVER_SERVERS = "server-servers"
    """Between the first of the servers that join relays, and the others."""


class Program(StrEnum):
    """A process."""

    RELAY = "relay"
    RELAY_2 = "relay-2"
    RELAY_3 = "relay-3"
    SERVER = "server"
    SERVER_2 = "server-2"
    SERVER_3 = "server-3"
    BROKER = "broker"
    NODE_0 = "node-0"
    NODE_1 = "node-1"
    NODE_2 = "node-2"
    NODE_3 = "node-3"
    NODE_4 = "node-4"
    NODE_5 = "node-5"


class End(StrEnum):
    """How a process is ended, to be started again."""

    SIGKILL = "SIGKILL"
    SIGTERM = "SIGTERM"


@dataclass(frozen=True, slots=True)
class RelayParts:
    """A relay, and the links by which agents and nodes connect to it.

    Attributes:
        servers: the one by which it connects to the servers, where there are several relays.
    """

    program: Program
    agents: Link
    nodes: Link
    servers: Link | None = None


@dataclass(frozen=True, slots=True)
class StayingNodes:
    """Nodes that stay at one relay: neither they nor it are ended, and their link is not disturbed.

    After a node has moved, calls under new keys are unknown for ten minutes. The others move all the time.
    """

    programs: tuple[Program, ...]
    relay: Program
    link: Link


NODES = (Program.NODE_0, Program.NODE_1, Program.NODE_2)

# Without TLS there is a connection only within one machine, whose bytes no network changes.
_UNCHANGED = (LinkFault.DELAY, LinkFault.CUT, LinkFault.BLACK_HOLE, LinkFault.TRUNCATE)


@dataclass(frozen=True, slots=True)
class Topology:
    """The parts of a site.

    Attributes:
        servers: the nats-servers that join the relays.
        nodes: all of them, also those that stay.
        weights: how often each part is disturbed, beside the others.
    """

    relays: tuple[RelayParts, ...]
    servers: tuple[Program, ...]
    nodes: tuple[Program, ...]
    weights: Mapping[Link | Program, int]
    staying: StayingNodes | None = None

    @property
    def programs(self) -> tuple[Program, ...]:
        """The processes that are ended and started again."""
        return tuple(part for part in self.weights if isinstance(part, Program))

    def faults_of(self, part: Link | Program) -> tuple[LinkFault | End, ...]:
        """Return what can happen to a part."""
        if isinstance(part, Program):
            return tuple(End)
        with_tls = {link for relay in self.relays for link in (relay.agents, relay.nodes)}
        return tuple(LinkFault) if part in with_tls else _UNCHANGED


# Most often where calls pass. A process takes seconds to start, and without a relay nothing is disturbed.
ONE_RELAY = Topology(
    relays=(RelayParts(Program.RELAY, Link.AGENT_RELAY, Link.NODE_RELAY),),
    servers=(),
    nodes=NODES,
    weights={
        Link.AGENT_RELAY: 12,
        Link.NODE_RELAY: 60,
        Link.NODE_BROKER: 28,
        Link.RELAY_BROKER: 12,
        Program.RELAY: 1,
        Program.BROKER: 2,
        **dict.fromkeys(NODES, 2),
    },
)
_THREE = (
    RelayParts(Program.RELAY, Link.AGENT_RELAY, Link.NODE_RELAY, Link.RELAY_SERVERS),
    RelayParts(Program.RELAY_2, Link.AGENT_RELAY_2, Link.NODE_RELAY_2, Link.RELAY_2_SERVERS),
    RelayParts(Program.RELAY_3, Link.AGENT_RELAY_3, Link.NODE_RELAY_3, Link.RELAY_3_SERVERS),
)
_SERVERS = (Program.SERVER, Program.SERVER_2, Program.SERVER_3)
_STAYING = StayingNodes((Program.NODE_3,), Program.RELAY_3, Link.STAYING_RELAY_3)
# The other nodes move to another relay when their link is cut, and when their relay ends.
THREE_RELAYS = Topology(
    relays=_THREE,
    servers=_SERVERS,
    nodes=(*NODES, *_STAYING.programs),
    weights={
        **{relay.agents: 4 for relay in _THREE},
        **{relay.nodes: 20 for relay in _THREE},
        **{relay.servers: 16 for relay in _THREE if relay.servers is not None},
        Link.SERVER_SERVERS: 6,
        Link.NODE_BROKER: 6,
        Link.RELAY_BROKER: 4,
        **{relay.program: 1 for relay in _THREE if relay.program is not _STAYING.relay},
        **dict.fromkeys(_SERVERS, 1),
        Program.BROKER: 1,
        **dict.fromkeys(NODES, 1),
    },
    staying=_STAYING,
)
