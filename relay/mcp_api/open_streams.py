"""Counts the streams that agents hold open: sessions of the old era, and subscriptions of the new.

Each agent has a limit, so that one cannot use up the limit of all; and a stream ends when the token that
opened it is revoked. Must not know what is sent on them.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection

from relay.auth.agent_tokens import AgentName, Principal
from schemas.error_roots import PeerError

PER_AGENT = 64
IN_ALL = 4096


class StreamLimitError(PeerError):
    """The limit of the agent, or that of all, is reached."""


class OpenStreams:
    """The streams of all agents."""

    def __init__(self, per_agent: int = PER_AGENT, in_all: int = IN_ALL) -> None:
        self._per_agent = per_agent
        self._in_all = in_all
        self._held = Counter[AgentName]()
        self._ends: defaultdict[str, dict[object, Callable[[], None]]] = defaultdict(dict)

    def check(self, principal: Principal) -> None:
        """Return if ``principal`` may open another stream.

        Raises:
            StreamLimitError: it may not.
        """
        if self._held[principal.name] >= self._per_agent or self._held.total() >= self._in_all:
            raise StreamLimitError

    def hold(self, principal: Principal, end: Callable[[], None] = lambda: None) -> Callable[[], None]:
        """Count a stream that ``principal`` has opened; ``end`` is called if its token is revoked.

        Returns what to call, once or more, when it is closed.
        """
        key = object()
        self._held[principal.name] += 1
        self._ends[principal.jti][key] = end

        def release() -> None:
            ends = self._ends.get(principal.jti, {})
            if ends.pop(key, None) is None:
                return
            if not ends:
                del self._ends[principal.jti]
            self._held[principal.name] -= 1
            if not self._held[principal.name]:
                del self._held[principal.name]

        return release

    def revoke(self, jtis: Collection[str]) -> None:
        """End the streams that were opened with one of the tokens."""
        for jti in self._ends.keys() & set(jtis):
            for end in list(self._ends[jti].values()):
                end()
