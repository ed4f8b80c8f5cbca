import pytest

from schemas.times import dated, iso, moments_of, with_iso

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


def test_a_moment_that_has_no_iso_form_is_left_as_it_is() -> None:
    assert with_iso({"ts_ms": 2**53 - 1}, {"ts_ms": "ts"}) == {"ts_ms": 2**53 - 1}


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
