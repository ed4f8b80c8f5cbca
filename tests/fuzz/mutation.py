"""How a good document is made a bad one: a few small changes, drawn from a source of randomness."""

import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Final

from schemas.frames import ONE_WAY

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


_VALUES: Final = (b"null", b"true", b"0", b"-1", b"1e300", b'""', b"{}", b"[]", b'"\\u0000"', b"[[[[[]]]]]")
_MAX_LINES: Final = 64
_DROPPED: Final = (b"cmd_ack", *(type_.encode() for type_ in ONE_WAY))
"""The types of which a malformed frame is dropped, and the session goes on."""
_SIMPLE: Final = re.compile(rb'": ?("(?:[^"\\\\]|\\\\.)*"|[-0-9a-z.+]+)')
_WHOLE: Final = 8
"""One sequence of lines in so many is changed as any document is, and mostly no longer one."""


def mutated_lines(samples: Sequence[bytes], chance: Random) -> bytes:
    """Return lines of ``samples`` that begin in one state, in any order, with other values in their payloads.

    At most one of them is of a type that ends the session when it is malformed, so that a session lives
    through many.
    """
    if chance.randrange(_WHOLE) == 0:
        return mutated(samples, chance)
    state = chance.choice(samples).partition(b"\n")[0]
    lines = [line for sample in samples if sample.startswith(state) for line in sample.split(b"\n")[1:]]
    dropped = [line for line in lines if any(b'"%b"' % type_ in line for type_ in _DROPPED)] or [b""]
    chosen = [_other_value(chance.choice(dropped), chance) for _ in range(chance.randint(1, _MAX_LINES))]
    if lines and chance.randrange(2):
        chosen[chance.randrange(len(chosen))] = _other_value(chance.choice(lines), chance)
    return b"\n".join((state, *chosen))


def _other_value(line: bytes, chance: Random) -> bytes:
    """Return ``line`` with another value for a member of its payload that is no object and no array."""
    payload = line.partition(b'"payload"')[2]
    simple = [found.span(1) for found in _SIMPLE.finditer(payload)]
    if not simple or chance.randrange(3) == 0:
        return line
    start, end = chance.choice(simple)
    changed = payload[:start] + chance.choice(_VALUES) + payload[end:]
    return line[: len(line) - len(payload)] + changed
