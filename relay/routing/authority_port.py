"""The interface between the certificate authority and the relays of a cluster that do not have its key.

Such a relay asks the one that has the key; both sides are the same for whatever carries the messages.
Must not know NATS, and must not issue.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Protocol

from schemas.error_roots import PeerError

AWAY_RETRY_MS = 15_000
"""When to ask again while the relay with the CA's key does not answer: about as long as its restart takes."""


class AuthorityAction(StrEnum):
    """What is asked, as ``cluster.ca_request`` names it. ``answered`` is what ``cluster.ca_answer`` does."""

    ENROL = "enrol"
    RENEW = "renew"
    RETIRE = "retire"
    CERTIFY = "certify"

    @property
    def answered(self) -> str:
        """The member of the answer."""
        return {"enrol": "enrolled", "renew": "renewed", "retire": "retired", "certify": "certified"}[self]


class AuthorityUnavailableError(PeerError):
    """The relay with the CA's key has not answered: what was asked may have been done, and can be repeated.

    Attributes:
        retry_after_ms: when asking again may help.
    """

    retry_after_ms = AWAY_RETRY_MS


class AuthorityRefusedError(PeerError):
    """The relay with the CA's key has refused. ``reason`` is a word of its own, for the audit.

    Attributes:
        retry_after_ms: when asking again may help; None if it will not.
    """

    def __init__(self, reason: str, retry_after_ms: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after_ms = retry_after_ms


class RemoteAuthority(Protocol):
    """Asks the relay that has the CA's key."""

    async def ask(self, action: AuthorityAction, members: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the members of the answer to ``action`` with ``members``, as the documents have them.

        Raises:
            AuthorityUnavailableError: there is no answer.
            AuthorityRefusedError: the other relay refuses.
        """
        ...


class AnsweringAuthority(Protocol):
    """Answers what another relay asks, with the CA's key."""

    async def answer(
        self, relay: str, action: AuthorityAction, members: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Return the members of the answer; ``relay`` names the process that asks.

        Raises:
            AuthorityRefusedError: it is refused.
        """
        ...


class AuthorityLink:
    """A ``RemoteAuthority`` that is connected to another one once that is assembled."""

    def __init__(self) -> None:
        self._to: RemoteAuthority | None = None

    def connect(self, to: RemoteAuthority) -> None:
        """Pass on to ``to`` from now on."""
        self._to = to

    async def ask(self, action: AuthorityAction, members: Mapping[str, Any]) -> Mapping[str, Any]:
        """Ask, as ``RemoteAuthority`` describes."""
        if self._to is None:
            raise AuthorityUnavailableError("this relay has not joined its cluster yet")
        return await self._to.ask(action, members)
