import pytest

from schemas.log_level import LogLevel, LogThreshold


@pytest.mark.parametrize(
    ("level", "admitted"),
    [
        (LogLevel.INFO, ["info", "warning", "error", "critical"]),
        (LogLevel.WARNING, ["warning", "error", "critical"]),
        (LogLevel.ERROR, ["error", "critical"]),
    ],
)
def test_a_level_admits_itself_and_what_is_more_severe(level: LogLevel, admitted: list[str]) -> None:
    threshold = LogThreshold()
    threshold.level = level
    names = ("debug", "info", "warning", "error", "critical")
    assert [name for name in names if threshold.admits(name)] == admitted
