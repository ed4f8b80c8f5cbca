import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.delivery import Admission, AnswerMemory, Ledger, TransitGauge
from tests.fakes.clock import FakeClock
from tests.fakes.signer import NOW_MS

PAYLOAD = {"tool": "t", "arguments": {"message": "ping"}, "deadline_ms": 2000, "sent_at_ms": NOW_MS}
PONG = {"ok": True, "result": {"message": "ping"}}


# --- the relay's book ---------------------------------------------------------------------------------


def ledger(*entries: tuple[str, int]) -> Ledger[str]:
    book: Ledger[str] = Ledger()
    for msg_id, expires_at_ms in entries:
        book.enter(msg_id, PAYLOAD, expires_at_ms, f"caller of {msg_id}")
    return book


def test_a_command_is_settled_once() -> None:
    book = ledger(("a", NOW_MS + 2000))
    assert book.settle("a") == "caller of a"
    assert book.settle("a") is None


def test_a_stranger_is_not_settled() -> None:
    book = ledger(("a", NOW_MS + 2000))
    assert book.settle("b") is None
    assert list(book) == ["a"]


def test_a_book_knows_how_many_wait_and_who() -> None:
    book = ledger(("a", NOW_MS + 2000), ("b", NOW_MS + 1000))
    assert len(book) == 2
    assert list(book) == ["a", "b"]
    book.settle("a")
    assert len(book) == 1
    assert list(book) == ["b"]
    assert list(Ledger[str]()) == []


def test_commands_can_be_settled_while_the_book_is_walked() -> None:
    book = ledger(("a", NOW_MS), ("b", NOW_MS), ("c", NOW_MS))
    assert [book.settle(msg_id) for msg_id in book] == ["caller of a", "caller of b", "caller of c"]
    assert len(book) == 0


def test_a_command_is_sent_again_under_its_own_id_with_what_is_left_of_its_budget() -> None:
    clock = FakeClock(NOW_MS)
    book = ledger(("a", clock() + 2000))
    clock.advance(1500)
    assert book.resendable(clock()) == [
        ("a", {**PAYLOAD, "deadline_ms": 500, "sent_at_ms": NOW_MS + 1500}),
    ]


def test_a_command_whose_deadline_has_passed_is_not_sent_again_and_still_waits() -> None:
    book = ledger(("over", NOW_MS), ("just-now", NOW_MS + 1), ("later", NOW_MS + 5))
    assert [msg_id for msg_id, _ in book.resendable(NOW_MS)] == ["just-now", "later"]
    assert list(book) == ["over", "just-now", "later"]


def test_a_settled_command_is_not_sent_again() -> None:
    book = ledger(("a", NOW_MS + 2000))
    book.settle("a")
    assert book.resendable(NOW_MS) == []


def test_sending_again_leaves_the_book_as_it_was() -> None:
    book = ledger(("a", NOW_MS + 2000))
    first = book.resendable(NOW_MS + 500)
    assert book.resendable(NOW_MS + 500) == first
    assert PAYLOAD["deadline_ms"] == 2000
    assert book.settle("a") == "caller of a"


# --- the node's memory --------------------------------------------------------------------------------


def test_a_command_is_new_once() -> None:
    memory = AnswerMemory()
    assert memory.admit("a") is Admission.NEW
    assert memory.admit("a") is Admission.SEEN


def test_a_command_that_runs_has_no_answer_yet() -> None:
    memory = AnswerMemory()
    memory.admit("a")
    assert memory.recall("a") is None
    assert memory.recall("never seen") is None


def test_a_command_that_ran_is_answered_from_memory_and_never_runs_again() -> None:
    memory = AnswerMemory()
    memory.admit("a")
    memory.remember("a", PONG)
    assert memory.admit("a") is Admission.SEEN
    assert memory.recall("a") == PONG


def test_a_full_memory_forgets_the_oldest_answer() -> None:
    memory = AnswerMemory(capacity=2)
    for msg_id in ("a", "b"):
        memory.admit(msg_id)
        memory.remember(msg_id, PONG)
    assert memory.admit("c") is Admission.NEW
    assert memory.recall("a") is None
    assert memory.recall("b") == PONG


def test_a_memory_holds_1024_answers_unless_told_otherwise() -> None:
    memory = AnswerMemory()
    for number in range(1025):
        memory.admit(str(number))
        memory.remember(str(number), PONG)
    assert memory.recall("0") is None
    assert memory.recall("1") == PONG


def test_a_full_memory_never_forgets_a_command_that_runs() -> None:
    memory = AnswerMemory(capacity=2)
    memory.admit("running")
    memory.admit("answered")
    memory.remember("answered", PONG)
    assert memory.admit("c") is Admission.NEW
    assert memory.admit("running") is Admission.SEEN
    assert memory.recall("answered") is None


def test_a_memory_full_of_running_commands_admits_no_other() -> None:
    memory = AnswerMemory(capacity=2)
    assert memory.admit("a") is Admission.NEW
    assert memory.admit("b") is Admission.NEW
    assert memory.admit("c") is Admission.FULL
    assert memory.admit("a") is Admission.SEEN
    memory.remember("a", PONG)
    assert memory.admit("c") is Admission.NEW


def test_a_command_that_was_refused_for_want_of_room_is_not_remembered() -> None:
    memory = AnswerMemory(capacity=1)
    memory.admit("running")
    memory.admit("refused")
    memory.remember("refused", PONG)
    assert memory.recall("refused") is None
    assert memory.admit("refused") is Admission.FULL


def test_an_answer_to_a_command_that_never_came_is_not_remembered() -> None:
    memory = AnswerMemory()
    memory.remember("a", PONG)
    assert memory.recall("a") is None
    assert memory.admit("a") is Admission.NEW


def test_an_answer_to_a_command_that_was_forgotten_does_not_bring_it_back() -> None:
    memory = AnswerMemory(capacity=1)
    memory.admit("a")
    memory.remember("a", PONG)
    memory.admit("b")
    memory.remember("a", PONG)
    assert memory.recall("a") is None
    assert memory.admit("a") is Admission.FULL


@given(
    st.lists(
        st.tuples(st.sampled_from(["admit", "answer"]), st.sampled_from("abcdefgh")), min_size=1, max_size=60
    )
)
def test_no_command_runs_a_second_time_while_it_is_remembered(steps: list[tuple[str, str]]) -> None:
    memory = AnswerMemory(capacity=3)
    running: set[str] = set()
    for step, msg_id in steps:
        answered = memory.recall(msg_id) is not None
        if step == "admit":
            admission = memory.admit(msg_id)
            assert (admission is Admission.SEEN) is (answered or msg_id in running)
            assert (admission is Admission.FULL) is (len(running) == 3 and msg_id not in running)
            if admission is Admission.NEW:
                running.add(msg_id)
        else:
            memory.remember(msg_id, PONG)
            assert (memory.recall(msg_id) is not None) is (answered or msg_id in running)
            running.discard(msg_id)
        assert len(running) <= 3


# --- the way ------------------------------------------------------------------------------------------


def test_the_first_message_stands_for_an_instant_journey() -> None:
    assert TransitGauge().delay_ms(NOW_MS, NOW_MS + 40) == 0


@pytest.mark.parametrize(
    "skew_ms", [0, 3_600_000, -3_600_000], ids=["agreeing", "an-hour-ahead", "an-hour-behind"]
)
def test_delay_is_what_exceeds_the_fastest_journey_whatever_the_clocks_say(skew_ms: int) -> None:
    gauge = TransitGauge()
    ours = NOW_MS + skew_ms
    gauge.delay_ms(NOW_MS, ours + 20)
    assert gauge.delay_ms(NOW_MS + 1000, ours + 1000 + 20) == 0
    assert gauge.delay_ms(NOW_MS + 2000, ours + 2000 + 320) == 300
    assert gauge.delay_ms(NOW_MS + 3000, ours + 3000 + 5) == 0
    assert gauge.delay_ms(NOW_MS + 4000, ours + 4000 + 20) == 15


@given(st.integers(-(10**9), 10**9), st.lists(st.integers(0, 60_000), min_size=1, max_size=20))
def test_a_delay_is_never_negative_and_never_more_than_the_journey(skew_ms: int, journeys: list[int]) -> None:
    gauge = TransitGauge()
    for journey in journeys:
        assert 0 <= gauge.delay_ms(NOW_MS, NOW_MS + journey + skew_ms) <= journey


@pytest.mark.parametrize(
    "step_ms", [3_600_000, -3_600_000], ids=["our-clock-set-forward", "our-clock-set-back"]
)
def test_a_clock_that_is_set_seems_like_delay_for_two_windows_at_most(step_ms: int) -> None:
    gauge = TransitGauge()
    gauge.delay_ms(NOW_MS, NOW_MS + 20)
    seeming = max(step_ms, 0)
    assert gauge.delay_ms(NOW_MS + 1000, NOW_MS + 1020 + step_ms) == seeming
    gauge.renew()
    assert gauge.delay_ms(NOW_MS + 2000, NOW_MS + 2020 + step_ms) == seeming
    gauge.renew()
    assert gauge.delay_ms(NOW_MS + 3000, NOW_MS + 3020 + step_ms) == 0
    assert gauge.delay_ms(NOW_MS + 4000, NOW_MS + 4050 + step_ms) == 30


def test_the_fastest_journey_of_the_window_before_still_counts() -> None:
    gauge = TransitGauge()
    gauge.delay_ms(NOW_MS, NOW_MS + 5)
    gauge.renew()
    assert gauge.delay_ms(NOW_MS, NOW_MS + 40) == 35
    assert gauge.delay_ms(NOW_MS, NOW_MS + 30) == 25


def test_a_journey_faster_than_those_of_the_window_before_counts_at_once() -> None:
    gauge = TransitGauge()
    gauge.delay_ms(NOW_MS, NOW_MS + 40)
    gauge.renew()
    assert gauge.delay_ms(NOW_MS, NOW_MS + 10) == 0
    assert gauge.delay_ms(NOW_MS, NOW_MS + 40) == 30


def test_after_two_silent_windows_a_message_is_the_first_again() -> None:
    gauge = TransitGauge()
    gauge.renew()
    assert gauge.delay_ms(NOW_MS, NOW_MS + 5) == 0
    gauge.renew()
    gauge.renew()
    assert gauge.delay_ms(NOW_MS, NOW_MS + 500) == 0


def test_a_clock_that_drifts_never_shows_more_delay_than_it_drifts_in_two_windows() -> None:
    gauge = TransitGauge()
    for heartbeat in range(100):
        gauge.renew()
        assert gauge.delay_ms(NOW_MS, NOW_MS + 3 * heartbeat) <= 3


@given(
    st.integers(-(10**9), 10**9),
    st.lists(st.lists(st.integers(0, 60_000), max_size=5), min_size=1, max_size=8),
)
def test_a_delay_is_what_exceeds_the_fastest_journey_of_this_window_and_the_one_before(
    skew_ms: int, windows: list[list[int]]
) -> None:
    gauge = TransitGauge()
    before: list[int] = []
    for journeys in windows:
        for count, journey in enumerate(journeys, 1):
            delay = gauge.delay_ms(NOW_MS, NOW_MS + journey + skew_ms)
            assert delay == journey - min(before + journeys[:count])
        gauge.renew()
        before = journeys


def test_a_book_knows_whether_a_command_still_waits() -> None:
    book: Ledger[str] = Ledger()
    book.enter("waits", {}, NOW_MS, "caller")
    assert "waits" in book
    book.settle("waits")
    assert "waits" not in book
