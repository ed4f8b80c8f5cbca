from relay.http.connections import Bounds, ConnectionRefusal
from relay.http.refusal_log import refusal_log
from schemas.process.logs import make_logger
from tests.fakes.lines import LogLines
from tests.fakes.seconds import Seconds

TOTAL, ADDRESS = ConnectionRefusal.TOTAL, ConnectionRefusal.ADDRESS


def test_rejected_connections_are_logged_once_a_minute_for_each_reason_with_the_limits() -> None:
    lines, seconds = LogLines(), Seconds()
    report = refusal_log(make_logger("relay", lines), Bounds.below(256), 256, seconds)
    for reason in (TOTAL, TOTAL, ADDRESS, TOTAL):
        report(reason)
    seconds.now += 61
    report(TOTAL)
    first, other, later = lines.entries("connections refused")
    assert (first["level"], first["reason"]) == ("warning", "total")
    assert (first["connections"], first["open_files"], first["kept_back"]) == (192, 256, 0)
    assert other["reason"] == "address"
    assert (later["reason"], later["kept_back"]) == ("total", 2)
