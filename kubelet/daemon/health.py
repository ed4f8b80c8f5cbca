"""The health of a node's subsystems, as its loopback pages show it.

Called from the threads of the loopback server: it reads, and must not change anything.
"""

from kubelet.announce.publisher import Publisher
from kubelet.caller_tools.assembly import CallerTools
from kubelet.daemon.node import Node
from kubelet.loopback.pages import Readiness
from kubelet.session.link_state import LinkState
from schemas.health import Health, Loop


def loops_of(node: Node, publisher: Publisher) -> dict[str, Loop]:
    """Return the loops without whose progress the daemon should be restarted, by subsystem."""
    return {"manifest": node.announcer.loop, "relay": node.link.loop, "broker": publisher.loop}


def readiness_of(node: Node, publisher: Publisher, tools: CallerTools) -> Readiness:
    """Return whether calls flow, and the health of each subsystem.

    A broker that is away is shown, but the session suffices for announcing.
    """
    link, announcer = node.link, node.announcer
    is_announced = link.state is LinkState.ANNOUNCED
    flow = link.flow
    flows = is_announced and flow.is_answered and flow.is_fresh
    is_issued = node.identity.root_pem is not None
    subsystems = {
        "identity": Health.passive(
            ready=is_issued, state="issued" if is_issued else "self-signed: install a certificate"
        ),
        "manifest": Health.of(
            announcer.loop,
            ready=announcer.current is not None,
            state=announcer.obstacle or ("signed" if announcer.current else "not signed yet"),
        ),
        "broker": publisher.health,
        "relay": Health.of(link.loop, ready=is_announced, state=link.state.value),
        "calls": Health(started=flow.is_answered, live=True, ready=flows, state=flow.state),
        "caller tools": Health.passive(ready=True, state=tools.summary()),
    }
    return Readiness(flows and not any(not health.live for health in subsystems.values()), subsystems)
