from schemas.pacing import Backoff, TokenBucket, half_by_chance


def test_the_burst_is_there_at_once_and_the_rest_at_the_rate() -> None:
    bucket = TokenBucket(rate=2.0, burst=3.0, now=10.0)
    assert [bucket.take(10.0) for _ in range(3)] == [0.0] * 3
    assert bucket.take(10.0) == 0.5
    assert bucket.take(10.5) == 0.0


def test_what_is_refused_takes_nothing() -> None:
    bucket = TokenBucket(rate=1.0, burst=3.0, now=0.0)
    assert bucket.take(0.0, 4.0) == 1.0
    assert bucket.take(0.0, 3.0) == 0.0


def test_a_clock_that_goes_back_fills_nothing() -> None:
    bucket = TokenBucket(rate=1.0, burst=1.0, now=5.0)
    assert bucket.take(5.0) == 0.0
    assert bucket.take(1.0) == 1.0
    assert bucket.take(2.0) == 0.0


def test_another_rate_gives_back_nothing_that_was_used_up() -> None:
    bucket = TokenBucket(rate=1.0, burst=5.0, now=0.0)
    bucket.take(0.0, 5.0)
    bucket.change(rate=4.0, burst=10.0)
    assert bucket.take(0.0) == 0.25
    assert not bucket.is_full(2.0)
    assert bucket.is_full(2.5)


def test_waits_double_up_to_the_longest_and_begin_anew() -> None:
    backoff = Backoff(1.0, 5.0)
    assert [backoff.next_s() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    backoff.reset()
    assert backoff.next_s() == 1.0


def test_half_of_a_wait_is_chance() -> None:
    backoff = Backoff(2.0, 5.0, half_by_chance(lambda: 0.5))
    assert [backoff.next_s() for _ in range(2)] == [1.5, 3.0]
