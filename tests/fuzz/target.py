"""What a fuzz target is, and how one tries a parser: a declared error is looked at, any other is a finding.

Must not know a parser.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import Any, Final, TypeVar

from schemas.error_roots import PeerError
from tests.fakes.hostile_texts import is_clean
from tests.fuzz.mutation import mutated

ResultT = TypeVar("ResultT")
Parse = Callable[[bytes], None]
Mutated = Callable[[Sequence[bytes], Random], bytes]

_SECRET_PART: Final = 8
"""How many characters of a secret in an error's text give it away; fewer occur in a text by chance."""


class Refused(Enum):
    """Stands for the result of a parser that has refused its input."""

    REFUSED = "refused"


REFUSED: Final = Refused.REFUSED


@dataclass(frozen=True, slots=True)
class Target:
    """A parser of bytes from outside, and the good inputs to begin from.

    Attributes:
        parse: takes any bytes, and ignores declared errors; whatever it raises is a finding.
        samples: the good inputs.
        max_bytes: the size of the largest input that is tried; larger ones take time and lead nowhere new.
        mutated: makes an input of good ones.
        by_lines: whether an input is lines, most of which are to stay as they are in each change.
        share: how much of a run's time it gets, in relation to others.
    """

    parse: Parse
    samples: Sequence[bytes]
    max_bytes: int = 4096
    mutated: Mutated = mutated
    by_lines: bool = False
    share: float = 1.0


def tried(parse: Callable[[], ResultT], *declared: type[Exception], secret: str = "") -> ResultT | Refused:
    """Return what ``parse`` returns; ``REFUSED`` if it raises a ``declared`` error, whose texts are checked.

    The text of an error is one line that can be shown anywhere, and holds no part of ``secret``.
    """
    try:
        return parse()
    except declared as error:
        for shown in _displayed(error):
            text = str(shown)
            assert text.isprintable(), ascii(text)
            assert is_clean(text) or not isinstance(shown, PeerError), ascii(text)
            assert not _gives_away(text, secret), "a part of a secret in an error"
        return REFUSED


def _displayed(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error``, and those behind it that a traceback would show."""
    shown: BaseException | None = error
    while shown is not None:
        yield shown
        shown = shown.__cause__ or (None if shown.__suppress_context__ else shown.__context__)


def _gives_away(text: str, secret: str) -> bool:
    parts = range(len(secret) - _SECRET_PART + 1)
    return any(secret[start : start + _SECRET_PART] in text for start in parts)


def text_of(data: bytes) -> str:
    """Return ``data`` as text, what is no UTF-8 as lone surrogates: a text can hold worse than a wire."""
    return data.decode("utf-8", "surrogateescape")


def plain_json(data: bytes) -> Any:
    """Return the JSON in ``data`` as the standard library reads it, or ``REFUSED``."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return REFUSED


def finished(work: Any) -> Any:
    """Return the result of a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    work.close()
    raise AssertionError("it waits")
