"""The interface between the ledgers of one relay and what the relays of a fleet have in common of them.

Each relay keeps the entries in files of its own; other relays' entries arrive there by what implements
``Sharing``. What an entry says is known to the package that owns the file and implements ``SharedLedger``.
Must not know a file, nor what carries the entries.
"""

import asyncio
from collections.abc import Callable, Container, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from typing import NamedTuple, Protocol

from relay.ledger import Entry

AT_ONCE = 256
"""How many entries of one ledger are shared before the others have their turn."""


class SharedLedger(Protocol):
    """The entries of one kind in a file of this relay's.

    Attributes:
        kind: names them; their document is ``cluster.<kind>@1.0.0``.
        ordered: whether an entry is valid only after those before it. Others commute: all of them together
            say the same in any order.
    """

    kind: str
    ordered: bool

    def key_of(self, entry: Entry) -> str:
        """Return the key of an entry that fits the document: of two with one key the later one counts.

        The key is of letters, digits, ``-`` and ``_``.

        Raises:
            ValueError: it is no entry all the same.
        """
        ...

    def end_ms_of(self, entry: Entry) -> int | None:
        """Return when such an entry says nothing more, in ms since 1970; None if it always does."""
        ...

    def settle(self, arrived: Mapping[str, Entry], known: Container[str]) -> Mapping[str, Entry]:
        """Add to the file what has ``arrived`` and is not in it, by key.

        Return the entries of the file that have not ended and that the other relays lack, at most
        ``AT_ONCE``: it is called again for the rest. ``known`` has the keys of those that they have, and may
        get more meanwhile. Runs on a thread.

        Raises:
            StateError, OSError: the file cannot be used. What has arrived is given again.
        """
        ...


class FinalEntries(NamedTuple):
    """The entries of a file: their keys, and what makes one, as most of them are known elsewhere."""

    keys: AbstractSet[str]
    entry_of: Callable[[str], Entry]


def settle_final(
    arrived: Mapping[str, Entry],
    known: Container[str],
    *,
    read: Callable[[], FinalEntries],
    add: Callable[[Sequence[Entry]], object],
    lasts: Callable[[Entry], bool] = lambda _entry: True,
) -> Mapping[str, Entry]:
    """Settle entries that are final, as a revocation is: those of all relays together count, in any order.

    ``read`` returns all of the file; ``add`` adds entries that were not in it; ``lasts`` returns whether one
    has not ended.
    """
    own = read()
    if new := sorted(arrived.keys() - own.keys):
        add([arrived[key] for key in new])
        own = read()
    lacking = ((key, own.entry_of(key)) for key in own.keys if key not in known)
    return dict(islice(((key, entry) for key, entry in lacking if lasts(entry)), AT_ONCE))


class Sharing(Protocol):
    """What shares the ledgers with the other relays of the fleet."""

    @property
    def understands(self) -> bool:
        """Whether all that this relay was told is understood; it may have been a revocation. Thread-safe."""
        ...

    def changed(self, *kinds: str) -> None:
        """Take in that there may be new entries of ``kinds`` in the files."""
        ...

    async def written(self, within_s: float) -> None:
        """Return when entries of other relays were added to a file, or after ``within_s``."""
        ...


class NotShared:
    """The ``Sharing`` of a relay that has its fleet alone."""

    understands = True

    def changed(self, *kinds: str) -> None:
        """There is no other relay."""

    async def written(self, within_s: float) -> None:
        """Return after ``within_s``."""
        await asyncio.sleep(within_s)
