"""What the operator decides about a node, checked before anything starts."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from schemas.addresses import BrokerAddress, check_private

DEFAULT_LOOPBACK_PORT = 8701
DEFAULT_HEARTBEAT_S = 60.0
DEFAULT_TTL_MS = 15 * 60_000


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """How one node reaches the world.

    Attributes:
        relay_url: in its normal form; it is the audience that this node signs for.
        heartbeat_s: seconds between two heartbeats, give or take a tenth.
        ttl_ms: how long a manifest is good for, in milliseconds.
        plain_allowed: whether the operator has said that others may read along.
        own_root: whether the relay and the broker are believed by the root of this node's leaf alone; else
            by what this machine trusts.

    Raises:
        AddressError: relay or broker may not be reached like this.
    """

    broker: BrokerAddress
    relay_url: str
    heartbeat_s: float = DEFAULT_HEARTBEAT_S
    ttl_ms: int = DEFAULT_TTL_MS
    plain_allowed: bool = False
    own_root: bool = False

    def __post_init__(self) -> None:
        check_private(self.relay_url, self.broker, plain_allowed=self.plain_allowed)


@dataclass(frozen=True, slots=True)
class DaemonPlan:
    """All that the daemon is told. It holds no secret, so it may stand on a command line."""

    config: NodeConfig
    state_dir: Path
    loopback_port: int

    def to_json(self) -> str:
        """Return the plan as text, for ``python -m kubelet.daemon``."""
        return json.dumps({**asdict(self), "state_dir": str(self.state_dir)})

    @classmethod
    def from_json(cls, text: str) -> "DaemonPlan":
        """Return the plan that ``to_json`` wrote."""
        plan = json.loads(text)
        config = plan["config"]
        return cls(
            config=NodeConfig(**{**config, "broker": BrokerAddress(**config["broker"])}),
            state_dir=Path(plan["state_dir"]),
            loopback_port=plan["loopback_port"],
        )


def default_state_dir(home: Path, *, is_root: bool) -> Path:
    """Return where a node's identity lies unless the operator says otherwise."""
    return Path("/var/lib/edge-kubelet") if is_root else home / ".local/state/edge-kubelet"
