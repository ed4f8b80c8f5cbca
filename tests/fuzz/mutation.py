"""How a good document is made a bad one: a few small changes, drawn from a source of randomness."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Final

_MAX_STEPS = 6
_MAX_BYTES = 1 << 16

WORDS: Final = (
    *(b"NaN", b"-Infinity", b"1e400", b"1e21", b"1e300", b"5e-324", b"-0", b"-0.0", b"9007199254740993"),
    *(
        b"null",
        b"true",
        b"{}",
        b"[]",
        b'""',
        b"[" * 40,
        b'{"":' * 40,
        b'"a":1,"a":1',
        b",",
        b":",
        b'"',
        b"\\",
    ),
    *(
        b"\\ud800",
        b"\\u0000",
        b"\\udc00\\ud800",
        b"\\u202e",
        b"\x00",
        b"\xff",
        b"\xed\xa0\x80",
        b"\xef\xbb\xbf",
    ),
    *(b"\x1b[31m", b"\r\n", b"\n", b"\x7f", "\u2028\u202e\u0661\uff11".encode(), b"../", b"%00", b"+", b"#"),
    *(
        b"-----BEGIN CERTIFICATE-----",
        b"-----END CERTIFICATE-----",
        b"=",
        b"==",
        b".",
        b"-",
        b"/",
        b"@",
        b"://",
    ),
)

Accident = Callable[[bytes, Random, Sequence[bytes]], bytes]


def _place(data: bytes, chance: Random) -> int:
    return chance.randrange(len(data) + 1)


def _flip(data: bytes, chance: Random, _others: Sequence[bytes]) -> bytes:
    if not data:
        return data
    at = chance.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]


def _replace(data: bytes, chance: Random, _others: Sequence[bytes]) -> bytes:
    at = _place(data, chance)
    return data[:at] + chance.randbytes(1) + data[at + 1 :]


def _insert(data: bytes, chance: Random, _others: Sequence[bytes]) -> bytes:
    at = _place(data, chance)
    return data[:at] + chance.choice(WORDS) + data[at + chance.choice((0, 0, 1, 4)) :]


def _cut(data: bytes, chance: Random, _others: Sequence[bytes]) -> bytes:
    at = _place(data, chance)
    return data[:at] + data[at + chance.choice((1, 2, 8, 64, len(data))) :]


def _double(data: bytes, chance: Random, _others: Sequence[bytes]) -> bytes:
    start, end = sorted((_place(data, chance), _place(data, chance)))
    return data[:end] + data[start:end] * chance.choice((1, 1, 2, 40)) + data[end:]


def _splice(data: bytes, chance: Random, others: Sequence[bytes]) -> bytes:
    other = chance.choice(others)
    return data[: _place(data, chance)] + other[_place(other, chance) :]


def _swap(data: bytes, chance: Random, _others: Sequence[bytes]) -> bytes:
    start, middle, end = sorted(_place(data, chance) for _ in range(3))
    return data[:start] + data[middle:end] + data[start:middle] + data[end:]


def _exchange(data: bytes, chance: Random, _others: Sequence[bytes]) -> bytes:
    """Put a word in the place of a whole value, which leaves JSON that is good but for what it says."""
    start = data.find(b":", _place(data, chance)) + 1
    end = min((at for at in (data.find(b",", start), data.find(b"}", start)) if at >= 0), default=len(data))
    return data[:start] + chance.choice(WORDS) + data[end:]


_ACCIDENTS: Final[tuple[Accident, ...]] = (
    _flip,
    _replace,
    _insert,
    _cut,
    _double,
    _splice,
    _swap,
    _exchange,
    _exchange,
)


def mutated(samples: Sequence[bytes], chance: Random) -> bytes:
    """Return one of ``samples`` after one change or several."""
    data = chance.choice(samples)
    for _ in range(chance.randint(1, _MAX_STEPS)):
        data = chance.choice(_ACCIDENTS)(data, chance, samples)[:_MAX_BYTES]
    return data
