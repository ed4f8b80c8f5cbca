"""A target with a fault that chance alone does not find, by which the tests see that the runner does."""

from typing import Final

from tests.fuzz.target import Target

_WORD: Final = b"flaw"


def parse(data: bytes) -> None:
    """Compare a byte at a time, each behind a branch of its own, and fail at the end."""
    if data[0:1] == _WORD[0:1]:  # noqa: SIM102 - the branches are the point
        if data[1:2] == _WORD[1:2]:  # noqa: SIM102 - as above
            if data[2:3] == _WORD[2:3]:  # noqa: SIM102 - as above
                if data[3:4] == _WORD[3:4]:
                    raise ZeroDivisionError("planted")


TARGETS: Final = {"planted": Target(parse, (b"",), max_bytes=16)}
