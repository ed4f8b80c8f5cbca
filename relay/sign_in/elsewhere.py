"""Another way to sign in than by a passkey, which sends the browser elsewhere: what the pages need of it."""

from typing import NamedTuple, Protocol

from relay.sign_in.consent import FormValues
from relay.state.people import Person

ATTEMPT_MS = 600_000
"""How long a browser may be elsewhere."""


class SignedIn(NamedTuple):
    """Who has signed in, what the session is held to (``Person.proofs``), and which page goes on."""

    person: Person
    proof: bytes
    back: str


class SignInElsewhere(Protocol):
    """``label`` is what its button says."""

    label: str

    async def begin(self, back: str) -> tuple[str, str]:
        """Return where the browser is sent, and the cookie that it keeps meanwhile; it comes ``back``.

        Raises:
            SignInRefusedError: that is not possible now.
        """
        ...

    async def answered(self, query: FormValues, cookie: str | None) -> SignedIn:
        """Return who has come back.

        Raises:
            SignInRefusedError: it is not proven, or the person may not sign in.
            LedgerError, OSError: the list of people cannot be used.
        """
        ...
