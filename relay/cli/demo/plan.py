"""Where the parts of a system on this machine are: its directory and its ports.

Must not start anything.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from relay.cli.demo.ports import ClaimedPorts
from relay.settings.config import StateFiles

_RELAY_PORT = 8700
_LOOPBACK_PORT = 8701
_BROKER_PORT = 1883


@dataclass(frozen=True, slots=True)
class Plan:
    """Where everything is.

    Attributes:
        relay_options: what the relay's command has besides; of an option given twice the last counts.
        kinds: the kinds of installed packages that the relay and this machine's kubelet are given.
        fleet_url: the public URL that several relays have in common; None of one alone. Nothing listens
            there: each node is given its relay's own URL besides, and so is behind that relay.
    """

    directory: Path
    state: StateFiles
    relay_port: int
    loopback_port: int
    broker_port: int
    relay_options: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    fleet_url: str | None = None

    @classmethod
    def below(cls, directory: Path, ports: ClaimedPorts, kinds: tuple[str, ...] = ()) -> "Plan":
        """Return a plan for ``directory``, with the usual ports where they are free."""
        return cls(
            directory=directory,
            state=StateFiles(directory / "relay"),
            relay_port=ports.take(_RELAY_PORT),
            loopback_port=ports.take(_LOOPBACK_PORT),
            broker_port=ports.take(_BROKER_PORT),
            kinds=kinds,
        )

    def moved(self) -> Iterator[str]:
        """Yield a line for each part whose usual port is in use."""
        chosen = {
            "relay": (_RELAY_PORT, self.relay_port),
            "kubelet": (_LOOPBACK_PORT, self.loopback_port),
            "broker": (_BROKER_PORT, self.broker_port),
        }
        for part, (usual, port) in chosen.items():
            if port != usual:
                yield f"port {usual} is in use on 127.0.0.1: the {part} takes {port}"

    @property
    def kubelet_state(self) -> Path:
        """The state directory of this machine's kubelet."""
        return self.directory / "kubelet"

    @property
    def socket(self) -> Path:
        """Where local agents connect to this machine's kubelet; not made where its path would be too long."""
        return self.kubelet_state / "relay.sock"

    @property
    def mocks(self) -> Path:
        """The directory of the mock nodes' identities."""
        return self.directory / "mocks"

    @property
    def url(self) -> str:
        """Where the relay is reached."""
        return f"http://127.0.0.1:{self.relay_port}"

    @property
    def public_url(self) -> str:
        """The relay's public URL, which nodes sign for and tokens are for."""
        return self.fleet_url or self.url

    @property
    def node_relays(self) -> tuple[str, ...]:
        """What nodes are given as ``--relay``, each."""
        return tuple(dict.fromkeys((self.public_url, self.url)))

    @property
    def broker(self) -> str:
        """The broker's ``HOST:PORT``."""
        return f"127.0.0.1:{self.broker_port}"
