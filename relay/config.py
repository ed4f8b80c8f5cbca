"""What the operator decides about a relay, and where its state lies."""

from dataclasses import dataclass
from pathlib import Path

from schemas.addresses import BrokerAddress, HostPort

DEFAULT_LISTEN = "127.0.0.1:8700"
DEFAULT_PUBLIC_URL = f"http://{DEFAULT_LISTEN}"
HEARTBEAT_INTERVAL_MS = 60_000


@dataclass(frozen=True, slots=True)
class RelayConfig:
    """How one relay reaches the world, and is reached.

    Attributes:
        public_url: in its normal form; nodes sign for it, and agents' tokens are for its ``/mcp``.
        listen: the one address that everything is served on.
    """

    broker: BrokerAddress
    public_url: str
    listen: HostPort
    state: "StateFiles"


class StateFiles:
    """The relay's state directory.

    | path | holds |
    |---|---|
    | `ca/` | the CA: `root.key` (0600), `root.pem`, `ledger.jsonl` |
    | `token.key` | the key that agent tokens are signed with (0600) |
    | `marks.sqlite3` | the newest manifest accepted from each node |
    | `audit.jsonl` | one line a decision and one an outcome (0600) |
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ca = root / "ca"
        self.token_key = root / "token.key"
        self.marks = root / "marks.sqlite3"
        self.audit = root / "audit.jsonl"


def default_state_dir(home: Path, *, is_root: bool) -> Path:
    """Return where a relay's state lies unless the operator says otherwise."""
    return Path("/var/lib/edge-relay") if is_root else home / ".local/state/edge-relay"
