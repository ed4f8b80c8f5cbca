"""The resources that one session, or one subscription of the new era, follows.

Must not send: each update is given to a callback.
"""

from collections.abc import Callable

from relay.auth.agent_tokens import Principal
from relay.telemetry.fleet_listening import FleetListening
from relay.telemetry.reading import TelemetryResource

MAX_FOLLOWED = 256


class FollowedResources:
    """The resources that ``principal`` follows here; ``updated`` is called with the URI of each update."""

    def __init__(
        self,
        telemetry: TelemetryResource | FleetListening,
        principal: Principal,
        updated: Callable[[str], None],
    ) -> None:
        self._telemetry = telemetry
        self._principal = principal
        self._updated = updated
        self._stops: dict[str, Callable[[], None]] = {}

    def add(self, uri: str) -> bool:
        """Follow ``uri``; return whether it can be followed, and there are not too many."""
        if uri in self._stops:
            return True
        if len(self._stops) >= MAX_FOLLOWED:
            return False
        stop = self._telemetry.follow(self._principal, uri, lambda: self._updated(uri))
        if stop is not None:
            self._stops[uri] = stop
        return stop is not None

    def remove(self, uri: str) -> None:
        """Follow ``uri`` no longer."""
        if (stop := self._stops.pop(uri, None)) is not None:
            stop()

    def close(self) -> None:
        """Follow nothing any more."""
        for uri in list(self._stops):
            self.remove(uri)
