"""The texts of one WebSocket past ASGI: what the server offers to an application for them.

ASGI takes a task that waits, and two dictionaries for each text. Must not know what a text means.
"""

from collections.abc import Callable, MutableMapping
from typing import Any, Protocol

TEXTS_IN_SCOPE = "edge.texts"
"""The key of a connection's ``Texts`` in the scope of its WebSocket."""
HANDLED_IN_MESSAGE = "edge.handled"
"""The key of what a ``TextHandler`` returned, in the message that the application receives."""

TextHandler = Callable[[str], object]
"""Called with each text while the application waits for a message. Returns None if the application need not
receive it, and else what it is to receive with it."""
MayWait = Callable[[bytes], bool]
"""Called with the first ``BEGINNING_BYTES`` of a text. Returns whether it may be handled up to ``DEFERRED_S``
after it has arrived, together with those of other connections. What arrives behind it ends the wait."""
BEGINNING_BYTES = 24


class Texts(Protocol):
    """The texts of one WebSocket."""

    @property
    def can_send_now(self) -> bool:
        """Whether ``send_now`` has an effect."""

    def send_now(self, text: str) -> bool:
        """Send ``text``; return False, without effect, if ASGI has to: it would wait, or it is closed."""

    def handle_texts(self, handler: TextHandler, may_wait: MayWait | None = None) -> None:
        """Offer each text to ``handler`` from now on, and some of them later."""


def take_texts(scope: MutableMapping[str, Any]) -> Texts | None:
    """Remove and return the texts of a connection: they refer to the scope, which must not refer to them."""
    texts: Texts | None = scope.pop(TEXTS_IN_SCOPE, None)
    return texts
