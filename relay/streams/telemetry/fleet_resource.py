"""The resource of a node's telemetry at all relays of a fleet: read and listened to at any of them.

Each relay judges the agent as one of its own. For reading, all that run are asked. That an agent listens, a
relay tells the others again and again while it lasts, since there need not be a subscription yet. Where the
agent has one, listening holds it as a listener of that relay would, and each update is sent to where it
listens; samples are not: they are read. Must not start a stream.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from attrs import define, field

from relay.auth.agent_tokens import AgentName, Authenticator, Principal
from relay.routing.port import NoResponderError, Peers
from relay.streams.telemetry.hub import Notify
from relay.streams.telemetry.reading import Place, TelemetryQueryError, TelemetryResource
from relay.streams.telemetry.stream import MIN_LEASE_S
from schemas.errors import Failure, ToolError
from schemas.health import Loop
from schemas.tokens import TokenError

READ, LISTEN, UPDATED = "telemetry_read", "telemetry_listen", "telemetry_updated"
"""What relays ask each other: to read, to hear of updates, and that there is one."""
MAX_LISTENING = 16_384
"""The agents and nodes for which other relays listen here; here, listeners are bounded by their streams."""

_RENEWED_EVERY_S = MIN_LEASE_S / 3
_SWEEP_S = 1.0
_ROUND_S = 60.0
_TELL_TIMEOUT_S = 1.0
_RETRY_MS = 10_000
_READ_TIMEOUT_S = 2.0
_MAX_CHARACTERS = 512 * 1024

Listen = Callable[[Principal, str, Notify], Callable[[], None]]
"""Calls back with each sample of a node that an agent has subscribed to, until what it returns is called."""
ListenerKey = tuple[AgentName, str]
"""An agent, and the node that it listens to."""


@define(eq=False, repr=False)
class FleetReading:
    """The resource at all relays: ``resource`` at this one, and at ``peers``."""

    _resource: TelemetryResource
    _peers: Peers
    _authenticator: Authenticator

    def __attrs_post_init__(self) -> None:
        self._peers.answer(READ, self._answer)

    async def read(self, principal: Principal, uri: str) -> str | None:
        """Return what another relay has of ``uri``; None if there is nothing, or this relay is to be read.

        That is where the agent has its own subscription, or else where it may read what others follow.

        Raises:
            UnknownNodeError: there is no such node for ``principal``.
        """
        uri_by_id = self._resource.by_id(principal, uri)
        if uri_by_id is None or self._resource.has_own(principal, uri_by_id):
            return None
        body = {"uri": uri_by_id, "principal": principal.facts()}
        asked = (_asked(self._peers, relay, READ, body, _READ_TIMEOUT_S) for relay in self._peers.running())
        found = [reply for reply in await asyncio.gather(*asked) if isinstance(reply.get("content"), str)]
        own = [reply["content"] for reply in found if reply.get("own") is True]
        if own or self._resource.has_any(principal, uri_by_id):
            return own[0] if own else None
        return found[0]["content"] if found else None

    async def _answer(self, _relay: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what this relay has: a ``PeerHandler``."""
        uri: str = body["uri"]
        principal = _principal_of(self._authenticator, body)
        if not principal.rights.may_read or self._resource.by_id(principal, uri) is None:
            return {}
        own = self._resource.has_own(principal, uri)
        try:
            content = self._resource.read(principal, uri, _MAX_CHARACTERS)
        except TelemetryQueryError:
            return {}
        return {} if content is None else {"content": content, "own": own}


@dataclass(slots=True)
class _Elsewhere:
    """An agent that listens at another relay: ``stop`` ends that here, at ``until_s`` at the latest."""

    stop: Callable[[], None]
    until_s: float


@define(eq=False, repr=False)
class FleetListening:
    """The listeners of this relay at its ``peers``, and theirs here.

    ``listen`` is that of ``TelemetryHub``; ``seconds`` is a monotonic clock.
    """

    _resource: TelemetryResource
    _listen: Listen
    _peers: Peers
    _authenticator: Authenticator
    _seconds: Callable[[], float]
    _here: defaultdict[ListenerKey, dict[object, Notify]] = field(
        init=False, factory=lambda: defaultdict(dict)
    )
    _principals: dict[ListenerKey, Principal] = field(init=False, factory=dict)
    _elsewhere: dict[tuple[str, ListenerKey], _Elsewhere] = field(init=False, factory=dict)
    _to_tell: dict[ListenerKey, tuple[Principal, float]] = field(init=False, factory=dict)
    _updated: dict[tuple[str, ListenerKey], None] = field(init=False, factory=dict)
    _wake: asyncio.Event = field(init=False, factory=asyncio.Event)
    _sweep_s: float = field(init=False)
    _renew_s: float = field(init=False)
    loop: Loop = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._sweep_s = self._seconds() + _SWEEP_S
        self._renew_s = self._seconds() + _RENEWED_EVERY_S
        self.loop = Loop(self._seconds)
        self._peers.answer(LISTEN, self._listens)
        self._peers.answer(UPDATED, self._has_updated)

    def place_of(self, principal: Principal, uri: str) -> Place | None:
        """Return what ``uri`` names, as ``TelemetryResource.place_of`` describes."""
        return self._resource.place_of(principal, uri)

    def follow(self, principal: Principal, uri: str, notify: Notify) -> Callable[[], None] | None:
        """Call ``notify`` after every update at any relay, as ``TelemetryResource.follow`` describes."""
        stop = self._resource.follow(principal, uri, notify)
        named = None if stop is None else self.place_of(principal, uri)
        if stop is None or named is None:
            return stop
        place, key = (principal.name, named[0]), object()
        self._here[place][key] = notify
        self._principals[place] = principal
        self._tell(place, principal, MIN_LEASE_S)

        def end() -> None:
            stop()
            listeners = self._here.get(place, {})
            if listeners.pop(key, None) is None or listeners:
                return
            del self._here[place], self._principals[place]
            self._tell(place, principal, 0)

        return end

    async def run(self) -> None:
        """Tell the other relays what is due until cancelled."""
        while True:
            self.loop.busy(_SWEEP_S + _ROUND_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(_SWEEP_S):
                    await self._wake.wait()
            self._wake.clear()
            if self._seconds() >= self._sweep_s:
                self.sweep()
            await self._send()

    def sweep(self) -> None:
        """End what other relays have not renewed, and renew what is due."""
        now = self._seconds()
        self._sweep_s = now + _SWEEP_S
        for key in [key for key, listening in self._elsewhere.items() if listening.until_s <= now]:
            self._elsewhere.pop(key).stop()
        if now >= self._renew_s:
            self._renew_s = now + _RENEWED_EVERY_S
            for place, principal in self._principals.items():
                self._tell(place, principal, MIN_LEASE_S)

    # --- to other relays

    def _tell(self, place: ListenerKey, principal: Principal, ttl_s: float) -> None:
        self._to_tell[place] = (principal, ttl_s)
        self._wake.set()

    async def _send(self) -> None:
        to_tell, self._to_tell = self._to_tell, {}
        updated, self._updated = self._updated, {}
        relays = self._peers.running()
        asked = [
            _asked(self._peers, relay, LISTEN, _listening(node_id, principal, ttl_s), _TELL_TIMEOUT_S)
            for (_, node_id), (principal, ttl_s) in to_tell.items()
            for relay in relays
        ]
        asked += [
            _asked(self._peers, relay, UPDATED, {"name": name, "node_id": node_id}, _TELL_TIMEOUT_S)
            for relay, (name, node_id) in updated
        ]
        await asyncio.gather(*asked)

    # --- from other relays

    async def _listens(self, relay: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Take in that an agent listens at another relay, or does no longer: a ``PeerHandler``."""
        principal = _principal_of(self._authenticator, body)
        place = (principal.name, body["node_id"])
        key = (relay, place)
        listening = self._elsewhere.get(key)
        if body["ttl_ms"] == 0:
            if listening is not None:
                self._elsewhere.pop(key).stop()
        elif listening is not None:
            listening.until_s = self._seconds() + body["ttl_ms"] / 1000
        elif len(self._elsewhere) >= MAX_LISTENING:
            raise ToolError(Failure.RATE_LIMITED, retry_after_ms=_RETRY_MS)
        elif principal.rights.may_read:
            stop = self._listen(principal, body["node_id"], lambda: self._note_updated(key))
            self._elsewhere[key] = _Elsewhere(stop, self._seconds() + body["ttl_ms"] / 1000)
        return {}

    def _note_updated(self, key: tuple[str, ListenerKey]) -> None:
        self._updated[key] = None
        self._wake.set()

    async def _has_updated(self, _relay: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Notify the listeners here of an update at another relay: a ``PeerHandler``."""
        name = body["name"]
        place = ((name[0], name[1], name[2]), body["node_id"])
        for notify in list(self._here.get(place, {}).values()):
            notify()
        return {}


def _listening(node_id: str, principal: Principal, ttl_s: float) -> Mapping[str, Any]:
    return {"node_id": node_id, "principal": principal.facts(), "ttl_ms": int(ttl_s * 1000)}


async def _asked(
    peers: Peers, relay: str, kind: str, body: Mapping[str, Any], timeout_s: float
) -> Mapping[str, Any]:
    """Return the answer of ``relay``; nothing if there is none: it is told again, or others have one."""
    try:
        return await peers.ask(relay, kind, body, timeout_s)
    except (NoResponderError, TimeoutError, ToolError):
        return {}


def _principal_of(authenticator: Authenticator, body: Mapping[str, Any]) -> Principal:
    """Return who another relay asks for, as this relay recognises it.

    Raises:
        ToolError: SAFETY_DENIED.
    """
    try:
        return authenticator.forwarded(**body["principal"])
    except TokenError:
        raise ToolError(Failure.SAFETY_DENIED) from None
