from relay.streams.telemetry.stream import History, HistoryBytes


def filled(count: int, history: History) -> History:
    for ts_ms in range(1, count + 1):
        history.append(ts_ms, f"{ts_ms:010}")
    return history


def test_the_newest_samples_are_kept_up_to_their_number() -> None:
    history = filled(400, History(HistoryBytes()))
    samples = history.since(0)
    assert [sample.ts_ms for sample in samples] == list(range(101, 401))
    assert (history.count, history.latest) == (400, samples[-1])


def test_a_history_is_read_from_a_time_on() -> None:
    assert [sample.ts_ms for sample in filled(5, History(HistoryBytes())).since(3)] == [4, 5]


def test_an_empty_history_has_no_latest_sample() -> None:
    history = History(HistoryBytes())
    assert (history.latest, history.since(0), history.lost_after(0)) == (None, [], 0)


def test_histories_share_their_bytes_and_each_keeps_its_latest_sample() -> None:
    in_all = HistoryBytes(limit=100)
    long, short = filled(10, History(in_all)), History(in_all)
    filled(3, short)
    assert [sample.ts_ms for sample in short.since(0)] == [3]
    assert len(long.since(0)) == 10
    long.append(11, "0" * 10)
    assert [sample.ts_ms for sample in long.since(0)] == [3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert in_all.used == 100
    for history in (long, short):
        history.clear()
    assert in_all.used == 0


def test_what_is_gone_after_a_number_is_counted() -> None:
    history = filled(12, History(HistoryBytes(), max_samples=5))
    assert [history.lost_after(number) for number in (0, 3, 7, 12)] == [7, 4, 0, 0]
    history.clear()
    assert history.lost_after(10) == 2
