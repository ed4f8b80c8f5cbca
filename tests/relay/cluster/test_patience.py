from relay.cluster.patience import Patience


def test_waits_double_up_to_the_longest_and_begin_anew() -> None:
    patience = Patience(1.0, 5.0, lambda: 1.0)
    assert [patience.wait_s() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    patience.reset()
    assert patience.wait_s() == 1.0


def test_half_of_a_wait_is_chance() -> None:
    assert Patience(2.0, 5.0, lambda: 0.0).wait_s() == 1.0
