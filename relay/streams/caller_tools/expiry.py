"""Ends what is over: requests without an answer, and sessions without use, a token, or their node.

Must not end anything by itself: ``endings`` does.
"""

import asyncio
from collections.abc import Callable

from structlog.typing import FilteringBoundLogger

from relay.auth.agent_tokens import Authenticator, Principal
from relay.streams.caller_tools.endings import Endings, SessionEnding
from relay.streams.caller_tools.limits import Timeouts
from relay.streams.caller_tools.nodes import Nodes
from relay.streams.caller_tools.outbox import Outbox
from relay.streams.caller_tools.registry import SessionRegistry
from relay.streams.caller_tools.requests import PendingRequest
from relay.streams.caller_tools.session import CallerSession
from schemas.caller_tools import CallerToolError
from schemas.health import Loop
from schemas.tokens import TokenError

INTERVAL_S = 0.25
_IDLE_S = 1.0
"""Without a session: one that is opened meanwhile lasts for longer."""
_ROUND_S = 60.0
_SESSIONS_EVERY = 4
"""Sessions are checked in every fourth round: there are thousands, and seconds do not matter to them."""


class Expiry:
    """Ends what is over at the time of each sweep. ``monotonic`` is in seconds."""

    def __init__(  # noqa: PLR0913, PLR0917 - what comes in from outside
        self,
        registry: SessionRegistry,
        endings: Endings,
        outbox: Outbox,
        nodes: Nodes,
        authenticator: Authenticator,
        timeouts: Timeouts,
        monotonic: Callable[[], float],
        log: FilteringBoundLogger,
    ) -> None:
        self._registry = registry
        self._endings = endings
        self._outbox = outbox
        self._nodes = nodes
        self._authenticator = authenticator
        self._timeouts = timeouts
        self._monotonic = monotonic
        self._log = log
        self.loop = Loop(monotonic)

    async def run(self) -> None:
        """Sweep until cancelled."""
        rounds = 0
        while True:
            self.loop.busy(_IDLE_S + _ROUND_S)
            await asyncio.sleep(INTERVAL_S if len(self._registry) or len(self._outbox) else _IDLE_S)
            try:
                self.sweep_requests()
                if rounds % _SESSIONS_EVERY == 0:
                    self.sweep_sessions()
            except Exception as error:  # noqa: BLE001 - a bug must be seen, and not stop what ends the rest
                self._log.error("sessions not swept", exc_info=error)
            rounds += 1

    def sweep_requests(self) -> None:
        """End the requests whose time is over, or whose caller has left; send what nodes can take by now."""
        now = self._monotonic()
        self._outbox.flush()
        self._each(self._sweep_requests_of, now)

    def sweep_sessions(self) -> None:
        """End the sessions that are over."""
        self._each(self._sweep_session, self._monotonic())

    def _each(self, sweep: Callable[[CallerSession, float], None], now: float) -> None:
        for session in self._registry:
            try:
                sweep(session, now)
            except Exception as error:  # noqa: BLE001 - a bug with one session must not keep the others open
                self._log.error("session not swept", session_id=session.session_id, exc_info=error)

    def _sweep_requests_of(self, session: CallerSession, now: float) -> None:
        if session.is_abandoned(now):
            self._endings.end_session(session, SessionEnding.DISCONNECTED)
            return
        unreachable_s = session.unreachable_s(now)
        for request in session.requests:
            error = self._end_of(request, unreachable_s, now)
            if error is not None:
                self._endings.fail(session, request, error)

    def _sweep_session(self, session: CallerSession, now: float) -> None:
        session.requests.forget_before(now - self._timeouts.kept)
        if now - session.last_used >= self._timeouts.idle:
            self._endings.end_session(session, SessionEnding.IDLE)
        elif not any(map(self._is_accepted, session.tokens.values())):
            self._endings.end_session(session, SessionEnding.REVOKED)
        elif not self._is_with_its_node(session):
            self._endings.end_session(session, SessionEnding.NODE_REVOKED)

    def _end_of(self, request: PendingRequest, unreachable_s: float, now: float) -> CallerToolError | None:
        waited_s = now - request.arrived
        if waited_s >= self._timeouts.request:
            return CallerToolError.TIMEOUT
        out_of_reach_s = min(waited_s, unreachable_s)
        if not request.has_reached_caller and out_of_reach_s >= self._timeouts.unreachable:
            return CallerToolError.DISCONNECTED
        return None

    def _is_accepted(self, principal: Principal) -> bool:
        try:
            self._authenticator.check(principal)
        except TokenError:
            return False
        return True

    def _is_with_its_node(self, session: CallerSession) -> bool:
        facts = session.facts
        return self._nodes.is_trusted(facts.tenant, facts.node_id, facts.node_key)
