"""The resource ``node://{node_id}/telemetry``: the latest sample, or with ``?since_ms=`` the history.

For the id a label or the beginning of the id will do; ``?cap=`` names the capability of a node with several.
Reading renews the lease of the agent's own subscription; without one the agent sees what others of its tenant
follow. Must not start a stream: without an interval there is none.
"""

import re
from collections.abc import Callable
from urllib.parse import parse_qs, unquote

from attrs import define
from pydantic_core import from_json

from relay.ascii_json import encoded
from relay.auth.agent_tokens import Principal
from relay.fleet.fleet import Fleet
from relay.fleet.node_names import UnknownNodeError
from relay.streams.telemetry.hub import TelemetryHub
from relay.streams.telemetry.stream import Stream
from schemas.error_roots import PeerError
from schemas.times import dated

_URI = re.compile(r"node://([!-.0-~]{1,256})/telemetry(?:\?([!-~]{0,128}))?")
_MAX_DIGITS = 15

Place = tuple[str, str | None]
"""A node, and the capability that is named; None for any."""


class TelemetryQueryError(PeerError):
    """The query is none. The text says what is allowed, and nothing of what was given."""


@define(eq=False, repr=False)
class TelemetryResource:
    """Reads and follows the resource of every node."""

    _hub: TelemetryHub
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
        """Return what ``uri`` names, however it is spelled; None if it is not one of these.

        Raises:
            UnknownNodeError: there is no such node for ``principal``.
        """
        match = _URI.fullmatch(uri)
        return None if match is None else (self._node(principal, match), _cap_id(match))

    def has_any(self, principal: Principal, uri: str) -> bool:
        """Return whether there is a stream that ``principal`` may read, its own or of others."""
        return bool(self._streams(principal, uri))

    def has_own(self, principal: Principal, uri: str) -> bool:
        """Return whether ``principal`` has a subscription here that it reads by ``uri``."""
        return any(stream.get(principal.name) is not None for stream in self._streams(principal, uri))

    def read(self, principal: Principal, uri: str, max_characters: int | None = None) -> str | None:
        """Return the content as JSON; None if there is no stream, or ``uri`` is not one of these.

        Of a history that is longer than ``max_characters`` the oldest samples are lost.

        Raises:
            UnknownNodeError: there is no such node for ``principal``.
            TelemetryQueryError: the query is none.
        """
        if (match := _URI.fullmatch(uri)) is None:
            return None
        asked = parse_qs(match[2] or "", keep_blank_values=True)
        if not asked.keys() <= {"since_ms", "cap"}:
            raise TelemetryQueryError("the parameters of this resource are since_ms and cap")
        cap_id, since = asked.get("cap", [None])[-1], asked.get("since_ms", [None])[-1]
        if since is not None and not (since.isdecimal() and len(since) <= _MAX_DIGITS):
            raise TelemetryQueryError("since_ms must be a time in milliseconds since 1970, 0 or more")
        for stream in self._hub.streams_of(principal, self._node(principal, match)):
            if cap_id in {None, stream.tool.cap_id}:
                return self._content(principal, stream, since, max_characters)
        return None

    def follow(self, principal: Principal, uri: str, notify: Callable[[], None]) -> Callable[[], None] | None:
        """Call ``notify`` after every update; return what ends that, or None if there is no such resource.

        There need not be a stream yet. Ending it ends the agent's subscription, if this was its last way to
        follow the node.
        """
        if (match := _URI.fullmatch(uri)) is None or not principal.rights.may_read:
            return None
        try:
            return self._hub.listen(principal, self._node(principal, match), notify)
        except UnknownNodeError:
            return None

    def _node(self, principal: Principal, match: re.Match[str]) -> str:
        return self._fleet.names.resolve(principal.tenant, unquote(match[1]))

    def _streams(self, principal: Principal, uri: str) -> list[Stream]:
        match = _URI.fullmatch(uri)
        if match is None:
            return []
        cap_id = _cap_id(match)
        streams = self._hub.streams_of(principal, self._node(principal, match))
        return [stream for stream in streams if cap_id in {None, stream.tool.cap_id}]

    def _content(
        self, principal: Principal, stream: Stream, since: str | None, max_characters: int | None
    ) -> str | None:
        subscription = self._hub.renewed(principal, stream)
        include = subscription.include if subscription is not None else None
        history = stream.history
        if since is None:
            latest = history.latest
            if subscription is not None:
                subscription.seen = history.count
            return None if latest is None else _dated(stream.shown(latest, include))
        samples = [_dated(stream.shown(sample, include)) for sample in history.since(int(since))]
        lost = 0
        if subscription is not None:
            lost, subscription.seen = history.lost_after(subscription.seen), history.count
        size = sum(map(len, samples))
        while max_characters is not None and size > max_characters and len(samples) > 1:
            size -= len(samples.pop(0))
            lost += 1
        return f'{{"samples":[{",".join(samples)}],"lost":{lost}}}'


def _dated(sample: str) -> str:
    return encoded(dated(from_json(sample)))


def _cap_id(match: re.Match[str]) -> str | None:
    named = parse_qs(match[2] or "").get("cap")
    return named[-1] if named else None
