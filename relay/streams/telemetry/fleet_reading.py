"""Reads the resource of a node's telemetry at the relay of the fleet that has it: where the agent subscribed.

Any relay is asked that runs, and judges the agent as one of its own. Must not start a stream.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from relay.auth.agent_tokens import Authenticator, Principal
from relay.routing.port import NoResponderError, Peers
from relay.streams.telemetry.reading import TelemetryQueryError, TelemetryResource
from schemas.errors import Failure, ToolError
from schemas.tokens import TokenError

READ = "telemetry_read"
"""What relays ask each other."""
_TIMEOUT_S = 2.0
_MAX_CHARACTERS = 512 * 1024


class FleetReading:
    """The resource at all relays: ``resource`` at this one, and at ``peers``."""

    def __init__(self, resource: TelemetryResource, peers: Peers, authenticator: Authenticator) -> None:
        self._resource = resource
        self._peers = peers
        self._authenticator = authenticator
        peers.answer(READ, self._answer)

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
        asked = (self._ask(relay, body) for relay in self._peers.running())
        found = [reply for reply in await asyncio.gather(*asked) if isinstance(reply.get("content"), str)]
        own = [reply["content"] for reply in found if reply.get("own") is True]
        if own or self._resource.has_any(principal, uri_by_id):
            return own[0] if own else None
        return found[0]["content"] if found else None

    async def _ask(self, relay: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what ``relay`` has: nothing, if it does not answer."""
        try:
            return await self._peers.ask(relay, READ, body, _TIMEOUT_S)
        except (NoResponderError, TimeoutError, ToolError):
            return {}

    async def _answer(self, _relay: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what this relay has: a ``PeerHandler``."""
        uri: str = body["uri"]
        try:
            principal = self._authenticator.forwarded(**body["principal"])
        except TokenError:
            raise ToolError(Failure.SAFETY_DENIED) from None
        if not principal.rights.may_read or self._resource.by_id(principal, uri) is None:
            return {}
        own = self._resource.has_own(principal, uri)
        try:
            content = self._resource.read(principal, uri, _MAX_CHARACTERS)
        except TelemetryQueryError:
            return {}
        return {} if content is None else {"content": content, "own": own}
