import pytest

from schemas.times import (
    DurationError,
    dated,
    duration_between,
    duration_text,
    iso,
    moments_of,
    parse_duration_ms,
    parse_duration_s,
    with_iso,
)

MOMENT = {"type": "integer", "minimum": 1_700_000_000_000}


@pytest.mark.parametrize(
    ("ms", "shown"),
    [(0, "1970-01-01T00:00:00.000Z"), (1_760_000_000_007, "2025-10-09T08:53:20.007Z")],
)
def test_a_moment_is_shown_with_its_milliseconds(ms: int, shown: str) -> None:
    assert iso(ms) == shown


def test_moments_are_told_from_durations_by_their_schema() -> None:
    members = {"ts_ms": MOMENT, "took_ms": {"type": "integer", "minimum": 0}, "at": MOMENT}
    assert moments_of({"properties": members}) == {"ts_ms": "ts"}
    assert moments_of({"properties": {**members, "ts": {}}}) == {}
    assert moments_of({}) == {}


@pytest.mark.parametrize("ms", [1_760_000_000_007, 1_760_000_000_007.0])
def test_the_iso_form_is_beside_its_milliseconds(ms: float) -> None:
    shown = with_iso({"ts_ms": ms, "more": 1}, {"ts_ms": "ts"})
    assert list(shown) == ["ts_ms", "ts", "more"]
    assert shown["ts"] == "2025-10-09T08:53:20.007Z"


@pytest.mark.parametrize("ms", [2**53 - 1, None])
def test_a_moment_that_has_no_iso_form_is_left_as_it_is(ms: int | None) -> None:
    assert with_iso({"ts_ms": ms}, {"ts_ms": "ts"}) == {"ts_ms": ms}


def test_every_moment_of_a_document_has_its_iso_form() -> None:
    moment, shown = 1_760_000_000_007, "2025-10-09T08:53:20.007Z"
    document = {"list": [{"at_ms": moment}], "took_ms": 5, "never_ms": None, "on_ms": True, "ms": moment}
    assert dated(document) == {**document, "list": [{"at_ms": moment, "at": shown}]}


@pytest.mark.parametrize(
    "document",
    [
        {"ts_ms": 1_760_000_000_007, "ts": "its own"},
        {"ts_ms": 10**15},
        {"ts_ms": 1e308},
        {"_ms": 1_760_000_000_007},
    ],
)
def test_a_document_keeps_its_own_members(document: dict[str, object]) -> None:
    assert dated(document) == document


SECOND, MINUTE, HOUR, DAY = 1000, 60_000, 3_600_000, 86_400_000


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("90s", 90 * SECOND),
        ("15m", 15 * MINUTE),
        ("1h30m", HOUR + 30 * MINUTE),
        ("30d", 30 * DAY),
        ("1d2h3m4s5ms", DAY + 2 * HOUR + 3 * MINUTE + 4 * SECOND + 5),
        ("500ms", 500),
        ("0h1s", SECOND),
    ],
)
def test_a_duration_is_numbers_with_units(text: str, ms: int) -> None:
    assert parse_duration_ms(text) == ms
    assert parse_duration_ms(duration_text(ms)) == ms


@pytest.mark.parametrize(
    "text",
    ["", "15", "0s", "-1s", "1.5h", "15 m", "15M", "1m1m", "30m1h", "1w", "s", "٣s", "1s\n", "9" * 10 + "s"],
)
def test_what_is_none_is_refused_with_examples(text: str) -> None:
    with pytest.raises(DurationError, match="write 90s, 15m, 1h30m or 30d") as caught:
        parse_duration_ms(text)
    assert str(caught.value).isprintable()


def test_a_duration_of_whole_seconds_has_no_rest() -> None:
    assert parse_duration_s("1h30m") == 5400
    with pytest.raises(DurationError, match="whole seconds"):
        parse_duration_s("1s500ms")


def test_a_duration_has_bounds() -> None:
    parse = duration_between("1s", "1h")
    assert (parse("1s"), parse("60m")) == (SECOND, HOUR)
    for text in ("999ms", "1h1ms"):
        with pytest.raises(DurationError, match="is not from 1s to 1h"):
            parse(text)


def test_a_duration_is_written_in_the_fewest_units() -> None:
    assert [duration_text(ms) for ms in (MINUTE, 90 * SECOND, 25 * HOUR)] == ["1m", "1m30s", "1d1h"]
