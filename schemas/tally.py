"""Counts of what is in use, by its holder. Holders come and go: one that holds nothing takes no memory."""

from collections import Counter
from typing import TypeVar

KeyT = TypeVar("KeyT")


class Tally(Counter[KeyT]):
    """A ``Counter`` without zeros: ``tally[key] -= 1`` removes a key that is counted no more."""

    def __setitem__(self, key: KeyT, count: int) -> None:
        if count:
            super().__setitem__(key, count)
        else:
            self.pop(key, None)
