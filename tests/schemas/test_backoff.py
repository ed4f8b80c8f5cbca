from schemas.backoff import Backoff, half_by_chance


def test_waits_double_up_to_the_longest_and_begin_anew() -> None:
    backoff = Backoff(1.0, 5.0)
    assert [backoff.next_s() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    backoff.reset()
    assert backoff.next_s() == 1.0


def test_half_of_a_wait_is_chance() -> None:
    backoff = Backoff(2.0, 5.0, half_by_chance(lambda: 0.5))
    assert [backoff.next_s() for _ in range(2)] == [1.5, 3.0]
