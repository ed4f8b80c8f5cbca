from relay.mcp_api.views.kind_tools import MAX_NUMBERS, summed_up

MOMENTS = {"ts_ms": "ts"}


def test_each_number_has_its_minimum_mean_and_maximum() -> None:
    samples = [
        {"ts_ms": 1000 * at, "name": "barn", "on": True, "cpu": {"usage_pct": usage}, "disk": [{"free": at}]}
        for at, usage in ((1, 10), (2, 20.5), (3, 0))
    ]
    assert summed_up(samples, MOMENTS) == {
        "times": [f"1970-01-01T00:00:0{at}.000Z" for at in (1, 2, 3)],
        "numbers": [
            {"name": "cpu.usage_pct", "min": 0, "mean": 10.167, "max": 20.5},
            {"name": "disk.0.free", "min": 1, "mean": 2, "max": 3},
        ],
    }


def test_a_sample_of_thousands_of_numbers_has_statistics_of_the_first() -> None:
    numbers = summed_up([{"ts_ms": 1, "per_core": [1] * 4096}], MOMENTS)["numbers"]
    assert [each["name"] for each in numbers] == [f"per_core.{place}" for place in range(MAX_NUMBERS)]


def test_a_time_that_no_calendar_has_is_left_out() -> None:
    assert summed_up([{"ts_ms": 2**53 - 1}, {"ts_ms": 0}], MOMENTS)["times"] == ["1970-01-01T00:00:00.000Z"]
