"""Which of many names are close to one that was misspelt.

Comparing two names costs microseconds, and there may be ten thousand: only those near it in sorted order, and
those that share a word with it, are compared. Must not know what the names are of.
"""

from bisect import bisect_left
from collections.abc import Sequence
from difflib import get_close_matches
from itertools import islice

MAX_CLOSE = 3
_NEIGHBOURS = 32
_SHARING_A_WORD = 64
_LONGEST = 48
_CUTOFF = 0.5


def closest(wanted: str, names: Sequence[str]) -> list[str]:
    """Return up to ``MAX_CLOSE`` of ``names``, which are sorted, that are close to ``wanted``; best first."""
    wanted = wanted[:_LONGEST]
    place = bisect_left(names, wanted)
    near = names[max(0, place - _NEIGHBOURS) : place + _NEIGHBOURS]
    words = [word for word in wanted.split() if len(word) > 1]
    sharing = islice((name for name in names if any(word in name for word in words)), _SHARING_A_WORD)
    return get_close_matches(wanted, dict.fromkeys([*near, *sharing]), MAX_CLOSE, _CUTOFF)
