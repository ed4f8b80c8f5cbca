"""The resource ``node://{node_id}/telemetry``: the latest sample, or with ``?since_ms=`` the history.

For the id a label or the beginning of the id will do; ``?cap=`` names the capability of a node with several.
Reading renews the lease of the agent's own subscription; without one the agent sees what others of its tenant
follow. In a fleet of several relays each judges the agent as one of its own. For reading, all that run are
asked. That an agent listens, a relay tells the others again and again while it lasts, since there need not be
a subscription yet. Where the agent has one, listening holds it as a listener of that relay would, and each
update is sent to where it listens; samples are not: they are read. Must not start a stream.
"""

import asyncio
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs, unquote

from attrs import define, field
from pydantic_core import from_json

from relay.auth.agent_tokens import AgentName, Authenticator, Principal
from relay.calls.stream_port import NodeTelemetry, Notify, Place, TelemetryQueryError
from relay.fleet.fleet import Fleet
from relay.fleet.node_names import UnknownNodeError
from relay.observability.ascii_json import encoded
from relay.routing.port import Asker, NoResponderError, Peers
from relay.streams.telemetry.hub import TelemetryHub
from relay.streams.telemetry.stream import MIN_LEASE_S, Stream
from schemas.errors import Failure, ToolError
from schemas.health import Loop
from schemas.times import dated

_URI = re.compile(r"node://([!-.0-~]{1,256})/telemetry(?:\?([!-~]{0,128}))?")
_MAX_DIGITS = 15


@define(eq=False, repr=False)
class TelemetryResource(NodeTelemetry):
    """The resource of every node, as far as this relay has it."""

    hub: TelemetryHub
    _fleet: Fleet

    def by_id(self, principal: Principal, uri: str) -> str | None:
        """Return ``uri`` with the full id of its node; None if it is not one of these.

        Raises:
            UnknownNodeError: there is no such node for ``principal``.
        """
        if (match := _URI.fullmatch(uri)) is None:
            return None
        query = "" if match[2] is None else f"?{match[2]}"
        return f"node://{self._node(principal, match)}/telemetry{query}"

    def place_of(self, principal: Principal, uri: str) -> Place | None:
        if (match := _URI.fullmatch(uri)) is None:
            return None
        named = parse_qs(match[2] or "").get("cap", [None])
        return self._node(principal, match), named[-1]

    def streams_of(self, principal: Principal, uri: str) -> list[Stream]:
        """Return the streams that ``principal`` may read by ``uri``, its own first."""
        if (place := self.place_of(principal, uri)) is None:
            return []
        node_id, cap_id = place
        streams = self.hub.streams_of(principal, node_id)
        return [stream for stream in streams if cap_id in {None, stream.tool.cap_id}]

    def has_own(self, principal: Principal, uri: str) -> bool:
        """Return whether ``principal`` has a subscription here that it reads by ``uri``."""
        return any(stream.get(principal.name) is not None for stream in self.streams_of(principal, uri))

    async def read(self, principal: Principal, uri: str) -> str | None:
        return self.content(principal, uri)

    def content(self, principal: Principal, uri: str, max_characters: int | None = None) -> str | None:
        """Return what ``read`` returns; of a longer history than ``max_characters`` the oldest are lost."""
        if (match := _URI.fullmatch(uri)) is None:
            return None
        asked = parse_qs(match[2] or "", keep_blank_values=True)
        if not asked.keys() <= {"since_ms", "cap"}:
            raise TelemetryQueryError("the parameters of this resource are since_ms and cap")
        cap_id, since = asked.get("cap", [None])[-1], asked.get("since_ms", [None])[-1]
        if since is not None and not (since.isdecimal() and len(since) <= _MAX_DIGITS):
            raise TelemetryQueryError("since_ms must be a time in milliseconds since 1970, 0 or more")
        for stream in self.hub.streams_of(principal, self._node(principal, match)):
            if cap_id in {None, stream.tool.cap_id}:
                return self._content(principal, stream, since, max_characters)
        return None

    def follow(self, principal: Principal, uri: str, notify: Notify) -> Callable[[], None] | None:
        if (match := _URI.fullmatch(uri)) is None or not principal.rights.may_read:
            return None
        try:
            return self.hub.listen(principal, self._node(principal, match), notify)
        except UnknownNodeError:
            return None

    def _node(self, principal: Principal, match: re.Match[str]) -> str:
        return self._fleet.reach.resolve(principal.rights, unquote(match[1]))

    def _content(
        self, principal: Principal, stream: Stream, since: str | None, max_characters: int | None
    ) -> str | None:
        subscription = self.hub.renewed(principal, stream)
        include = subscription.include if subscription is not None else None
        history = stream.history
        if since is None:
            latest = history.latest
            if subscription is not None:
                subscription.seen = history.count
            return None if latest is None else _dated(stream.shown(latest, include))
        seen = subscription.seen if subscription is not None else history.count
        samples = [_dated(stream.shown(sample, include)) for sample in history.since(int(since), seen)]
        lost = history.lost_after(seen)
        if subscription is not None:
            subscription.seen = history.count
        size = sum(map(len, samples))
        while max_characters is not None and size > max_characters and len(samples) > 1:
            size -= len(samples.pop(0))
            lost += 1
        return f'{{"samples":[{",".join(samples)}],"lost":{lost}}}'


def _dated(sample: str) -> str:
    return encoded(dated(from_json(sample)))


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

ListenerKey = tuple[AgentName, str]
"""An agent, and the node that it listens to."""


@define(eq=False, repr=False)
class _Elsewhere:
    """An agent that listens at another relay: ``stop`` ends that here, at ``until_s`` at the latest."""

    stop: Callable[[], None]
    until_s: float


@define(eq=False, repr=False)
class FleetTelemetry(NodeTelemetry):
    """The resource at all relays: ``here`` at this one, and at ``peers``. ``seconds`` is monotonic."""

    _here: TelemetryResource
    _peers: Peers
    _authenticator: Authenticator
    _seconds: Callable[[], float]
    _notified: defaultdict[ListenerKey, dict[object, tuple[Principal, Notify]]] = field(
        init=False, factory=lambda: defaultdict(dict)
    )
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
        self._peers.answer(READ, self._answer)
        self._peers.answer(LISTEN, self._listens)
        self._peers.answer(UPDATED, self._has_updated)

    def place_of(self, principal: Principal, uri: str) -> Place | None:
        return self._here.place_of(principal, uri)

    async def read(self, principal: Principal, uri: str) -> str | None:
        """Return the content where the agent has its own subscription, or else where others have one."""
        if (uri_by_id := self._here.by_id(principal, uri)) is None:
            return None
        if not self._here.has_own(principal, uri_by_id):
            body = {"uri": uri_by_id, "principal": principal.facts()}
            asked = (
                self._asked(relay, READ, body, _READ_TIMEOUT_S, principal.token)
                for relay in self._peers.running()
            )
            replies = await asyncio.gather(*asked)
            found = [reply for reply in replies if isinstance(reply.get("content"), str)]
            own = [reply for reply in found if reply.get("own") is True]
            if own or (found and not self._here.streams_of(principal, uri_by_id)):
                content: str = (own or found)[0]["content"]
                return content
        return self._here.content(principal, uri)

    def follow(self, principal: Principal, uri: str, notify: Notify) -> Callable[[], None] | None:
        """Call ``notify`` after every update at any relay."""
        stop = self._here.follow(principal, uri, notify)
        named = None if stop is None else self.place_of(principal, uri)
        if stop is None or named is None:
            return stop
        place, key = (principal.name, named[0]), object()
        self._notified[place][key] = principal, notify
        self._tell(place, principal, MIN_LEASE_S)

        def end() -> None:
            stop()
            listeners = self._notified.get(place, {})
            if listeners.pop(key, None) is None or listeners:
                return
            del self._notified[place]
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
            for place, listeners in self._notified.items():
                # One agent may use several tokens: that of a listener which has ended may be refused.
                principal, _ = max(listeners.values(), key=lambda listener: listener[0].expires_s)
                self._tell(place, principal, MIN_LEASE_S)

    # --- to other relays

    def _tell(self, place: ListenerKey, principal: Principal, ttl_s: float) -> None:
        self._to_tell[place] = (principal, ttl_s)
        self._wake.set()

    async def _send(self) -> None:
        to_tell, self._to_tell = self._to_tell, {}
        updated, self._updated = self._updated, {}
        told = list[tuple[str, str, Mapping[str, Any], str]]()
        for (_, node_id), (who, ttl_s) in to_tell.items():
            body = {"node_id": node_id, "principal": who.facts(), "ttl_ms": int(ttl_s * 1000)}
            told += [(relay, LISTEN, body, who.token) for relay in self._peers.running()]
        told += [(relay, UPDATED, {"name": name, "node_id": at}, "") for relay, (name, at) in updated]
        asked = (self._asked(relay, kind, body, _TELL_TIMEOUT_S, token) for relay, kind, body, token in told)
        await asyncio.gather(*asked)

    async def _asked(
        self, relay: str, kind: str, body: Mapping[str, Any], timeout_s: float, token: str
    ) -> Mapping[str, Any]:
        """Return the answer of ``relay``; nothing if there is none: it is told again, or others have one."""
        try:
            return await self._peers.ask(relay, kind, body, timeout_s, token)
        except (NoResponderError, TimeoutError, ToolError):
            return {}

    # --- from other relays, each a ``PeerHandler``

    async def _answer(self, asker: Asker, body: Mapping[str, Any]) -> Mapping[str, Any]:
        uri: str = body["uri"]
        principal = await self._authenticator.of_asker(asker.token, body["principal"])
        if not principal.rights.may_read:
            return {}
        try:
            own = self._here.has_own(principal, uri)
            content = self._here.content(principal, uri, _MAX_CHARACTERS)
        except (TelemetryQueryError, UnknownNodeError):  # a node may not be known here yet
            return {}
        return {} if content is None else {"content": content, "own": own}

    async def _listens(self, asker: Asker, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Handle that an agent listens at another relay, or does no longer."""
        principal = await self._authenticator.of_asker(asker.token, body["principal"])
        key = (asker.relay, (principal.name, body["node_id"]))
        listening = self._elsewhere.get(key)
        until_s = self._seconds() + body["ttl_ms"] / 1000
        if body["ttl_ms"] == 0:
            if listening is not None:
                self._elsewhere.pop(key).stop()
        elif listening is not None:
            listening.until_s = until_s
            self._here.hub.renew_own(principal, body["node_id"])  # as listening does once
        elif len(self._elsewhere) >= MAX_LISTENING:
            raise ToolError(Failure.RATE_LIMITED, retry_after_ms=_RETRY_MS)
        elif principal.rights.may_read:
            stop = self._here.hub.listen(principal, body["node_id"], lambda: self._note_updated(key))
            self._elsewhere[key] = _Elsewhere(stop, until_s)
        return {}

    def _note_updated(self, key: tuple[str, ListenerKey]) -> None:
        self._updated[key] = None
        self._wake.set()

    async def _has_updated(self, _asker: Asker, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Notify the listeners here of an update at another relay."""
        issuer, tenant, sub = body["name"]
        for _, notify in list(self._notified.get(((issuer, tenant, sub), body["node_id"]), {}).values()):
            notify()
        return {}
