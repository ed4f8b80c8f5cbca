from relay.state.retry_backoff import RetryBackoff


def test_waits_double_up_to_the_longest_and_begin_anew() -> None:
    backoff = RetryBackoff(1.0, 5.0, lambda: 1.0)
    assert [backoff.wait_s() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    backoff.reset()
    assert backoff.wait_s() == 1.0


def test_half_of_a_wait_is_chance() -> None:
    assert RetryBackoff(2.0, 5.0, lambda: 0.0).wait_s() == 1.0
