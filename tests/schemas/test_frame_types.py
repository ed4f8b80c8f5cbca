import pytest

from schemas.frame_types import ONE_WAY, FrameBudgets, OneWayType, Role
from schemas.frames import FRAME_TYPES, MAX_FRAME_BYTES
from tests.fakes.seconds import Seconds


@pytest.mark.parametrize("type_", OneWayType)
def test_a_row_is_a_frame_type_with_limits_within_those_of_a_connection(type_: OneWayType) -> None:
    assert ONE_WAY[type_.value] is type_
    assert type_.value in FRAME_TYPES
    assert 0 < type_.max_bytes <= MAX_FRAME_BYTES
    assert 0 < type_.per_s <= type_.burst


def taken(budgets: FrameBudgets, type_: OneWayType) -> int:
    count = 0
    while budgets.take(type_) == 0:
        count += 1
    return count


@pytest.mark.parametrize("type_", OneWayType)
def test_a_receiver_accepts_a_burst_and_then_the_rate(type_: OneWayType) -> None:
    clock = Seconds()
    receiver = Role.NODE if type_.sender is Role.RELAY else Role.RELAY
    budgets = FrameBudgets(receiver, clock)
    assert taken(budgets, type_) == type_.burst
    wait_s = budgets.take(type_)
    assert wait_s == pytest.approx(1 / type_.per_s)
    clock.now += wait_s
    assert taken(budgets, type_) == 1


@pytest.mark.parametrize("type_", OneWayType)
def test_a_sender_sends_less_at_once_than_the_receiver_accepts(type_: OneWayType) -> None:
    assert taken(FrameBudgets(type_.sender, Seconds()), type_) == max(1, type_.burst // 2)


def test_each_type_has_a_rate_of_its_own() -> None:
    budgets = FrameBudgets(Role.RELAY, Seconds())
    taken(budgets, OneWayType.TELEMETRY)
    assert budgets.take(OneWayType.TELEMETRY_LEASE) == 0
