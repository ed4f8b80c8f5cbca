import pytest

from kubelet.caller_tools.json_rpc import LineSplitter


def lines_of(*pieces: bytes, limit: int = 8) -> list[bytes | None]:
    splitter = LineSplitter(limit)
    return [line for piece in pieces for line in splitter.feed(piece)]


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ([b"one\ntwo\n"], [b"one", b"two"]),
        ([b"o", b"n", b"e", b"\n"], [b"one"]),
        ([b"one\r\n"], [b"one"]),
        ([b"half"], []),
        ([b"\n\n"], [b"", b""]),
        ([b"12345678\n"], [b"12345678"]),
    ],
)
def test_pieces_are_cut_into_lines_wherever_they_were_cut(pieces: list[bytes], lines: list[bytes]) -> None:
    assert lines_of(*pieces) == lines


@pytest.mark.parametrize("pieces", [[b"123456789\nnext\n"], [b"12345", b"6789", b"0\nnext", b"\n"]])
def test_a_line_over_the_limit_is_reported_once_and_the_next_one_is_read(pieces: list[bytes]) -> None:
    assert lines_of(*pieces) == [None, b"next"]


def test_an_endless_line_is_reported_at_the_limit_and_does_not_grow_memory() -> None:
    splitter = LineSplitter(8)
    assert [line for _ in range(1000) for line in splitter.feed(b"12345")] == [None]
    assert len(splitter._held) == 0  # noqa: SLF001 - what a client could make grow


def test_lines_over_the_limit_one_after_the_other_are_each_reported() -> None:
    assert lines_of(b"123456789\n123456789\nok\n") == [None, None, b"ok"]
