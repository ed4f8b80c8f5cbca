import pytest

from relay.sessions.session import SessionClock
from relay.settings.environment import TOLERANCE_MS, RelayClock, now_ms, ticks_ms
from schemas.manifest import MAX_FUTURE_MS
from schemas.process.logs import make_logger
from schemas.times import FIRST_CREDIBLE_MS, SystemClock, ValidityClock, is_credible
from tests.fakes.clock import FakeClock
from tests.fakes.lines import LogLines
from tests.fakes.signer import NOW_MS

HOUR_MS = 3_600_000
SET = "the system's clock was set by minutes: until it is right, manifests and tokens are refused"
BACK = "the system's clock is back where it was before it was set"
BORNE_OUT = "the system's clock is right as it was set: a node's agrees with it"
STEPS = [10_000, -10_000, TOLERANCE_MS, -TOLERANCE_MS]
LARGE_STEPS = [TOLERANCE_MS + 1, -TOLERANCE_MS - 1, HOUR_MS, -HOUR_MS]


class Stage:
    def __init__(self) -> None:
        self.system = FakeClock(NOW_MS)
        self.lines = LogLines()
        self.clock = RelayClock(self.system, self.system.ticks_ms, make_logger("relay", self.lines))

    def logged(self) -> list[str]:
        return [line["event"] for line in self.lines.entries()]


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_a_clock_that_is_not_set_is_followed(stage: Stage) -> None:
    for passed in (0, 1, 999, HOUR_MS):
        assert stage.system.advance(passed) == stage.clock()
    assert stage.clock.is_trusted()
    assert stage.logged() == []


@pytest.mark.parametrize("began_ms", [0, FIRST_CREDIBLE_MS - 1])
def test_a_clock_that_has_not_been_set_is_trusted_once_it_is(began_ms: int) -> None:
    system, lines = FakeClock(began_ms), LogLines()
    clock = RelayClock(system, system.ticks_ms, make_logger("relay", lines))
    assert not clock.is_trusted()
    system.step(NOW_MS - began_ms)
    assert clock() == NOW_MS
    assert clock.is_trusted()
    assert [line["event"] for line in lines.entries()] == [
        "the system's clock is not set: until it is, manifests and tokens are refused",
        "the system's clock is set",
    ]


@pytest.mark.parametrize("by_ms", STEPS)
def test_a_step_within_the_tolerance_moves_nothing_at_once(stage: Stage, by_ms: int) -> None:
    stage.system.step(by_ms)
    assert stage.clock() == NOW_MS
    assert stage.clock.is_trusted()
    assert stage.logged() == []


@pytest.mark.parametrize("by_ms", STEPS)
@pytest.mark.parametrize("looks", [1, 7, 10_000])
def test_it_is_made_up_within_half_an_hour_and_never_backwards(stage: Stage, by_ms: int, looks: int) -> None:
    stage.system.step(by_ms)
    before = stage.clock()
    each = abs(by_ms) * 8 // looks
    for _ in range(looks):
        stage.system.advance(each)
        now = stage.clock()
        assert each * 7 // 8 - 1 <= now - before <= each * 9 // 8 + 1
        before = now
    assert abs(stage.clock() - stage.system()) <= 2 * looks / 8 + 1  # the rest of the division
    stage.system.advance(HOUR_MS)
    assert stage.clock() == stage.system()


@pytest.mark.parametrize("by_ms", LARGE_STEPS)
def test_a_larger_step_is_followed_and_named_and_puts_the_clock_in_doubt(stage: Stage, by_ms: int) -> None:
    stage.system.step(by_ms)
    assert not stage.clock.is_trusted()
    assert stage.clock() == NOW_MS + by_ms
    assert stage.system.advance(1000) == stage.clock()
    assert not stage.clock.is_trusted()
    (line,) = stage.lines.entries(SET)
    assert line["by_ms"] == by_ms


@pytest.mark.parametrize("by_ms", LARGE_STEPS)
@pytest.mark.parametrize("off_ms", [0, TOLERANCE_MS, -TOLERANCE_MS])
def test_it_heals_when_it_is_set_back_within_the_tolerance(stage: Stage, by_ms: int, off_ms: int) -> None:
    stage.system.step(by_ms)
    assert not stage.clock.is_trusted()
    stage.system.advance(5000)
    stage.system.step(off_ms - by_ms)
    assert stage.clock() == NOW_MS + 5000 + (off_ms > 0) * 625 - (off_ms < 0) * 625
    assert stage.clock.is_trusted()
    assert stage.logged() == [SET, BACK]


def test_while_in_doubt_it_is_followed_wherever_it_goes_and_named_once(stage: Stage) -> None:
    for by_ms in (HOUR_MS, HOUR_MS, -5 * HOUR_MS):
        stage.system.step(by_ms)
        assert stage.clock() == stage.system()
        assert not stage.clock.is_trusted()
    assert stage.logged() == [SET]


@pytest.mark.parametrize("by_ms", LARGE_STEPS)
def test_a_node_that_agrees_with_it_bears_out_a_clock_that_was_wrong_before(stage: Stage, by_ms: int) -> None:
    stage.system.step(by_ms)
    assert not stage.clock.is_trusted()
    stage.clock.compare(stage.system() - TOLERANCE_MS - 1)
    stage.clock.compare(stage.system() + TOLERANCE_MS + 1)
    assert not stage.clock.is_trusted()
    stage.clock.compare(stage.system() - TOLERANCE_MS)
    assert stage.clock.is_trusted()
    assert stage.logged() == [SET, BORNE_OUT]
    stage.system.step(-by_ms)
    assert not stage.clock.is_trusted()


def test_a_node_that_agrees_with_a_clock_that_is_not_in_doubt_is_no_news(stage: Stage) -> None:
    stage.clock.compare(NOW_MS)
    assert stage.logged() == []


def test_a_step_leaves_room_for_the_nodes_own_clock() -> None:
    assert TOLERANCE_MS < MAX_FUTURE_MS


def test_the_systems_own_clocks_are_read_in_milliseconds() -> None:
    assert now_ms() > 1_700_000_000_000
    first = ticks_ms()
    assert 0 < first <= ticks_ms()


def test_mypy_refuses_one_clock_in_the_place_of_another() -> None:
    # It reports an ignore that nothing needs.
    relay = RelayClock(now_ms, ticks_ms, make_logger("relay", LogLines()))
    session = SessionClock(relay(), ticks_ms)
    for_records = list[SystemClock]([now_ms])
    for_records += [relay]  # type: ignore[list-item]
    for_records += [session]  # type: ignore[list-item]
    for_validity = list[ValidityClock]([relay])
    for_validity += [now_ms]  # type: ignore[list-item]
    for_validity += [session]  # type: ignore[list-item]
    assert all(is_credible(clock()) for clock in (*for_records, *for_validity))
