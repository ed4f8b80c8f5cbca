"""The MQTT topics of the system, and which node a message on one claims to be from.

Must not decide whether the claim is true: a signature does.
"""

from schemas.projection import is_node_id

ALL_IDENTITIES = "$devices/+/identity"
ALL_ANNOUNCES = "$devices/+/announce"
ALL_HEARTBEATS = "$devices/+/heartbeat"

_LEVELS = 3


def identity(node_id: str) -> str:
    """Retained: PEM of the leaf, then its chain."""
    return f"$devices/{node_id}/identity"


def announce(node_id: str) -> str:
    """Retained: the wire bytes of the manifest."""
    return f"$devices/{node_id}/announce"


def heartbeat(node_id: str) -> str:
    """Not retained: that the node is alive."""
    return f"$devices/{node_id}/heartbeat"


def telemetry(node_id: str) -> str:
    """Not retained: one sample of a capability, while there is a lease."""
    return f"$devices/{node_id}/telemetry"


def written_by(node_id: str) -> tuple[str, ...]:
    """Return every topic that a node writes, and none that it does not."""
    return identity(node_id), announce(node_id), heartbeat(node_id), telemetry(node_id)


def subject(topic: str) -> str:
    """Return the subject that stands for ``topic`` in nats-server."""
    return topic.replace("/", ".")


def parse(topic: str) -> tuple[str, str] | None:
    """Return ``(node_id, channel)`` of a topic below ``$devices``; None for any other.

    >>> parse("$devices/01hzx9k3m4p7q8r9s0t1v2w3xy/announce")
    ('01hzx9k3m4p7q8r9s0t1v2w3xy', 'announce')
    """
    levels = topic.split("/")
    if len(levels) == _LEVELS and levels[0] == "$devices" and is_node_id(levels[1]):
        return levels[1], levels[2]
    return None
