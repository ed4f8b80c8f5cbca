"""The resources that one session, or one subscription of the new era, follows.

One resource has many URIs: the node's id, the beginning of it, its label, and a query. It is followed once,
and each update carries the URI by which it was first followed. Must not send: each update is given to a
callback.
"""

from collections import Counter
from collections.abc import Callable

from relay.auth.agent_tokens import AgentName, Principal
from relay.fleet.node_names import UnknownNodeError
from relay.streams.telemetry.fleet_listening import FleetListening
from relay.streams.telemetry.reading import Place, TelemetryResource

MAX_FOLLOWED = 256
"""Of one session, or one subscription."""
PER_AGENT = 2 * MAX_FOLLOWED
"""By all streams of one agent: to follow others, it opens a new stream before it closes the old one."""


class FollowedResources:
    """The resources that ``principal`` follows here; ``updated`` is called with the URI of each update.

    ``held`` counts those of each agent on all of its streams.
    """

    def __init__(
        self,
        telemetry: TelemetryResource | FleetListening,
        principal: Principal,
        updated: Callable[[str], None],
        held: Counter[AgentName],
    ) -> None:
        self._telemetry = telemetry
        self._principal = principal
        self._updated = updated
        self._held = held
        self._followed: dict[Place, tuple[str, Callable[[], None]]] = {}

    def add(self, uri: str) -> bool:
        """Follow ``uri``; return whether it can be followed, and there are not too many."""
        place, name = self._place_of(uri), self._principal.name
        if place is None or place in self._followed:
            return place is not None
        if len(self._followed) >= MAX_FOLLOWED or self._held[name] >= PER_AGENT:
            return False
        stop = self._telemetry.follow(self._principal, uri, lambda: self._updated(uri))
        if stop is not None:
            self._followed[place] = uri, stop
            self._held[name] += 1
        return stop is not None

    def remove(self, uri: str) -> None:
        """Follow no longer what ``uri`` names, or was named by it: a label may have been given away."""
        named = [place for place, (first, _) in self._followed.items() if first == uri]
        place = named[0] if named else self._place_of(uri)
        if place in self._followed:
            self._end(place)

    def close(self) -> None:
        """Follow nothing any more."""
        for place in list(self._followed):
            self._end(place)

    def _end(self, place: Place) -> None:
        _, stop = self._followed.pop(place)
        self._held[self._principal.name] -= 1
        if not self._held[self._principal.name]:
            del self._held[self._principal.name]
        stop()

    def _place_of(self, uri: str) -> Place | None:
        try:
            return self._telemetry.place_of(self._principal, uri)
        except UnknownNodeError:
            return None
