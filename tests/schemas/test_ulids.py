import pytest
from hypothesis import given
from hypothesis import strategies as st
from ulid import ULID

from schemas.projection import is_node_id
from schemas.ulids import UlidSource, new_node_id
from tests.fakes.clock import FakeClock
from tests.fakes.signer import NOW_MS


def source(now_ms: int = NOW_MS, fill: int = 0xFF) -> UlidSource:
    return UlidSource(FakeClock(now_ms), lambda count: bytes([fill]) * count)


def test_the_example_of_the_ulid_specification() -> None:
    # The largest ULID there is, as the specification writes it.
    assert source(2**48 - 1).new() == "7ZZZZZZZZZZZZZZZZZZZZZZZZZ"
    assert source(0, 0).new() == "0" * 26


@given(st.integers(0, 2**48 - 1), st.binary(min_size=16, max_size=16))
def test_it_is_what_the_library_makes_of_five_bits_of_each_byte(now_ms: int, randomness: bytes) -> None:
    made = UlidSource(lambda: now_ms, lambda count: randomness[:count]).new()
    bits = int("".join(f"{byte & 31:05b}" for byte in randomness), 2)
    assert made == str(ULID(now_ms.to_bytes(6, "big") + bits.to_bytes(10, "big")))


def test_a_later_ulid_sorts_after_an_earlier_one() -> None:
    clock = FakeClock(NOW_MS)
    fills = iter([b"\xff", b"\x00"])
    ulids = UlidSource(clock, lambda count: next(fills) * count)
    earlier = ulids.new()
    clock.advance(1)
    assert earlier < ulids.new()


def test_each_random_byte_is_used_for_one_digit_of_one_ulid() -> None:
    taken: list[int] = []

    def random_bytes(count: int) -> bytes:
        taken.append(count)
        return bytes((sum(taken[:-1]) + number) // 16 % 32 for number in range(count))

    ulids = UlidSource(FakeClock(NOW_MS), random_bytes)
    made = [ulids.new()[10:] for _ in range(96)]
    assert sum(taken) == 96 * 16
    # The bytes are 0 sixteen times, then 1, and so on: a digit from another ULID's would differ.
    assert sorted(made) == sorted(
        digit * 16 for digit in "0123456789ABCDEFGHJKMNPQRSTVWXYZ" for _ in range(3)
    )


@pytest.mark.parametrize("now_ms", [-1, 2**48])
def test_a_time_that_a_ulid_cannot_hold_is_an_error(now_ms: int) -> None:
    with pytest.raises(OverflowError):
        source(now_ms).new()
    with pytest.raises(OverflowError):
        new_node_id(now_ms, bytes)


def test_a_node_id_is_a_ulid_in_lower_case() -> None:
    made = new_node_id(NOW_MS, bytes)
    assert is_node_id(made)
    assert made == UlidSource(lambda: NOW_MS, bytes).new().lower()
