"""Which of many names are close to one that was misspelt.

Comparing two names costs microseconds, and there may be ten thousand. Compared are only those near it in
sorted order, and some that share a word with it, by the word that the fewest have. Must not know what the
names are of.
"""

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from itertools import chain, islice

MAX_CLOSE = 3
_NEIGHBOURS = 8
_SHARING_A_WORD = 24
_LONGEST = 48
_CUTOFF = 0.5


def closest(
    wanted: str, names: Sequence[str], by_word: Mapping[str, Collection[str]] | None = None
) -> list[str]:
    """Return up to ``MAX_CLOSE`` of ``names``, which are sorted, that are close to ``wanted``; best first.

    ``by_word`` has the names that contain a word.
    """
    wanted = wanted[:_LONGEST]
    place = bisect_left(names, wanted)
    near = names[max(0, place - _NEIGHBOURS) : place + _NEIGHBOURS]
    known = [by_word[word] for word in dict.fromkeys(wanted.split()) if word in by_word] if by_word else []
    known.sort(key=len)
    sharing = islice(chain.from_iterable(known), _SHARING_A_WORD)
    return get_close_matches(wanted, dict.fromkeys([*near, *sharing]), MAX_CLOSE, _CUTOFF)
