"""Another relay of the fleet, as far as one is told which relay a node is connected to."""

from collections.abc import Collection, Mapping
from typing import Any

from relay.routing.port import NoResponderError, PeerHandler


class OtherRelay:
    """The only other relay of the fleet, which has every node."""

    relay = "01HZX9K3M4P7Q8R9S0T1V2W3XD"

    def running(self) -> Collection[str]:
        """Return none: it answers nothing."""
        return ()

    def relay_of(self, _node_id: str) -> str | None:
        """Return this relay, of any node."""
        return self.relay

    def answer(self, _kind: str, _handler: PeerHandler) -> None:
        """Have no questions answered."""

    async def ask(
        self, _relay: str, _kind: str, _body: Mapping[str, Any], _timeout_s: float
    ) -> Mapping[str, Any]:
        """Fail: it does not run."""
        raise NoResponderError("none runs")
