"""Which relays were heard lately, and with which of two that differ more of them agree.

Must not send anything.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from relay.ascii_json import encoded

MAX_HEARD = 256
"""How many relays are counted; of more, those that were heard last."""


@dataclass(frozen=True, slots=True)
class RelayIdentity:
    """What a relay says of itself.

    Attributes:
        url: its public URL, in its normal form.
        roots: the kids of the roots of nodes that it trusts now.
    """

    relay: str
    url: str
    roots: Sequence[str]

    def said(self) -> bytes:
        """Return the message that says so."""
        return encoded({"relay": self.relay, "url": self.url, "roots": list(self.roots)}).encode("ascii")

    def agrees(self, other: "RelayIdentity") -> bool:
        """Return whether both can be of one fleet."""
        return self.url == other.url and not set(self.roots).isdisjoint(other.roots)


class HeardRelays:
    """The relays that were heard in the last ``within_s`` seconds, by their ids."""

    def __init__(self, monotonic: Callable[[], float], within_s: float) -> None:
        self._monotonic = monotonic
        self._within_s = within_s
        self._heard: dict[str, tuple[RelayIdentity, float]] = {}

    def add(self, other: RelayIdentity) -> None:
        """Take in that ``other`` has said so now."""
        self._heard.pop(other.relay, None)
        self._heard[other.relay] = (other, self._monotonic())
        if len(self._heard) > MAX_HEARD:
            del self._heard[next(iter(self._heard))]

    def __contains__(self, relay: str) -> bool:
        """Return whether the relay with that id was heard lately."""
        return any(each.relay == relay for each in self._lately())

    def stays(self, own: RelayIdentity, other: RelayIdentity) -> bool:
        """Return whether ``own`` stays, and not ``other``: more relays agree with it, or its id is lower."""
        lately = [each for each in self._lately() if each.relay not in {own.relay, other.relay}]
        ours, theirs = (sum(map(each.agrees, lately)) for each in (own, other))
        return own.relay < other.relay if ours == theirs else ours > theirs

    def _lately(self) -> list[RelayIdentity]:
        since = self._monotonic() - self._within_s
        return [each for each, at in self._heard.values() if at >= since]
