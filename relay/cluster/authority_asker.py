"""Asks the relay that has the CA's key, over NATS. Must not know what is issued, or to whom."""

import asyncio
from collections.abc import Mapping
from typing import Any

from structlog.typing import FilteringBoundLogger

from relay.routing.authority_messages import AskedOfAuthority, AuthorityMessages, authority_subject
from relay.routing.authority_port import AuthorityAction, AuthorityRefusedError, AuthorityUnavailableError
from relay.routing.cluster_messages import ClusterMessageError
from relay.routing.nats import CountCommand, Requests
from relay.routing.port import NoResponderError

AT_ONCE = 8
"""How many requests are sent and not answered. The relay that answers makes four at a time."""
MAX_WAITING = 64
TIMEOUT_S = 6.0
"""From the request to its answer, waiting included: a node that enrols gives up after 10 s."""


class AuthorityAsker:
    """A ``RemoteAuthority`` by ``requests``. ``relay`` names this process to the others."""

    def __init__(  # noqa: PLR0913 - what comes in from outside
        self,
        *,
        requests: Requests,
        messages: AuthorityMessages,
        fleet: str,
        relay: str,
        count: CountCommand,
        log: FilteringBoundLogger,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._requests = requests
        self._messages = messages
        self._subject = authority_subject(fleet)
        self._relay = relay
        self._count = count
        self._log = log
        self._timeout_s = timeout_s
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._waiting = 0

    async def ask(self, action: AuthorityAction, members: Mapping[str, Any]) -> Mapping[str, Any]:
        """Ask, as ``RemoteAuthority`` describes."""
        try:
            answer = await self._asked(action, members)
        except AuthorityUnavailableError:
            self._count("away")
            raise
        except AuthorityRefusedError:
            self._count("refused")
            raise
        self._count("ok")
        return answer

    async def _asked(self, action: AuthorityAction, members: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._waiting >= MAX_WAITING:
            raise AuthorityUnavailableError("too many requests wait for the relay with the CA's key")
        payload = self._messages.request(AskedOfAuthority(self._relay, action, members))
        self._waiting += 1
        try:
            async with asyncio.timeout(self._timeout_s), self._turns:
                data = await self._requests.request(self._subject, payload, self._timeout_s)
            return self._messages.read_answer(data, action)
        except NoResponderError:
            raise AuthorityUnavailableError("no relay with the CA's key is connected") from None
        except TimeoutError:
            raise AuthorityUnavailableError("the relay with the CA's key does not answer in time") from None
        except ClusterMessageError as error:
            self._log.warning("answer of the relay with the CA's key dropped", reason=str(error))
            raise AuthorityUnavailableError("the relay with the CA's key gives no valid answer") from None
        finally:
            self._waiting -= 1
