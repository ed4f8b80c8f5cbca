"""The interface between a file of what was decided, which commands write, and the relay that applies it.

Must not know a file, nor what is decided.
"""

from collections.abc import Collection
from typing import Protocol, TypeVar

ContentT = TypeVar("ContentT")


class WatchedLedger(Protocol[ContentT]):
    """One file, or several that are read together.

    Attributes:
        name: names it in the log.
    """

    name: str

    @property
    def kinds(self) -> Collection[str]:
        """The kinds of its entries that relays of a fleet share, as in ``relay.shared_ledger``."""
        ...

    def stamp(self) -> object:
        """Return what differs after every change: a cheap check. Thread-safe.

        Raises:
            StateError, OSError: it cannot be found out.
        """
        ...

    def read(self) -> ContentT:
        """Return what the file says. Runs on a thread.

        Raises:
            StateError, OSError: it cannot be read.
        """
        ...

    def begin(self, content: ContentT) -> None:
        """Apply what was decided before the relay was started, and is on record."""
        ...

    def apply(self, content: ContentT) -> None:
        """Apply what was decided since, and record it."""
        ...


class Record(Protocol):
    """Records a decision once it is in effect."""

    def __call__(self, event: str, **facts: str) -> None:
        """Record ``event``, with ``facts`` of it by name."""
        ...
