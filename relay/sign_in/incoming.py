"""What holds of every request of sign-in before it is looked at: limits by address, and bounds of its body.

An address from which a person has signed in has a limit of its own, so that others' tries, however many, do
not shut that person out. It tells nothing of who exists: an address has it by a success alone. Must not read
what is in a request.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Self

from attrs import define, field
from starlette.requests import ClientDisconnect, Request

from relay.limits.rate_limits import Allowance, KeyedLimiters
from schemas.addresses import address_group
from schemas.error_roots import PeerError
from schemas.errors import ToolError

MAX_BODY = 32 * 1024
BODY_TIMEOUT_S = 10.0
OF_AN_ADDRESS = Allowance(rate=2, burst=40, concurrency=16)
OF_ALL = Allowance(rate=40, burst=400, concurrency=128)
"""Together, and of loopback: there a proxy has the requests of all."""
_MAX_KNOWN = 4096


class SignInRefusedError(PeerError):
    """A request is refused, with a status and the sentence that its answer shows."""

    def __init__(self, status: int, text: str, reason: str, retry_after_ms: int | None = None) -> None:
        super().__init__(text)
        self.status, self.text, self.reason, self.retry_after_ms = status, text, reason, retry_after_ms

    @classmethod
    def too_many(cls) -> Self:
        """Return the refusal where as many wait as may."""
        return cls(503, "Too many sign in at once: try again in a moment.", "too_many", 1_000)


@define(eq=False, repr=False)
class AddressMeter:
    """Meters requests by their address. ``may_sign_in`` says whether a person still may."""

    _limits: KeyedLimiters[str]
    _may_sign_in: Callable[[str], bool]
    _known: OrderedDict[str, str] = field(init=False, factory=OrderedDict)

    def admit(self, request: Request) -> str:
        """Return the address that the request came from, within its limits.

        Raises:
            SignInRefusedError: they are reached.
        """
        address = address_of(request)
        group = address_group(address)
        person = self._known.get(group) if group is not None else None
        try:
            if group is not None:
                # First: what one address sends beyond its own limit uses up nothing of all others'.
                self._limits.charge(group, OF_AN_ADDRESS, 1)
            if person is None or not self._may_sign_in(person):
                self._limits.charge("", OF_ALL, 1)
        except ToolError as error:
            retry = error.retry_after_ms
            raise SignInRefusedError(
                429, "Too many requests: try again in a moment.", "too_many", retry
            ) from None
        return address

    def signed_in(self, address: str, person: str) -> None:
        if (group := address_group(address)) is None:
            return
        self._known[group] = person
        self._known.move_to_end(group)
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)


def address_of(request: Request) -> str:
    """Return where ``request`` came from, for limits and audit."""
    return request.client.host if request.client else "unknown"


async def read_body(request: Request, limit: int) -> bytes:
    """Return the body of ``request``.

    Raises:
        SignInRefusedError: it is too large, does not end in time, or its client has gone.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for piece in request.stream():
                body += piece
                if len(body) > limit:
                    raise SignInRefusedError(413, "The request is too large.", "too_large")
    except TimeoutError:
        raise SignInRefusedError(408, "The request did not end.", "slow") from None
    except ClientDisconnect:
        raise SignInRefusedError(400, "The client has gone.", "gone") from None
    return bytes(body)
