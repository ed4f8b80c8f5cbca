import io
import json
from datetime import UTC, datetime

from kubelet.logs import make_logger


class Terminal(io.StringIO):
    """A stream that a person looks at."""

    def isatty(self) -> bool:
        return True


def test_programs_get_one_line_of_json_an_event() -> None:
    stream = io.StringIO()
    log = make_logger(stream)
    log.info("first", code=4001, text="a\nb\x1b[31m")
    log.error("second")
    first, second = map(json.loads, stream.getvalue().splitlines())
    stamp = datetime.fromisoformat(first.pop("timestamp"))
    assert stamp.tzinfo == UTC
    assert first == {"event": "first", "level": "info", "code": 4001, "text": "a\nb\x1b[31m"}
    assert (second["event"], second["level"]) == ("second", "error")


def test_people_get_a_line_to_read() -> None:
    stream = Terminal()
    make_logger(stream).warning("relay lost", code=4008)
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert "relay lost" in text
    assert "4008" in text
    assert not text.startswith("{")


def test_what_is_only_for_developers_is_left_out() -> None:
    stream = io.StringIO()
    make_logger(stream).debug("detail")
    assert stream.getvalue() == ""


def test_an_exception_stays_on_its_line() -> None:
    stream = io.StringIO()
    log = make_logger(stream)
    try:
        int("a bug")
    except ValueError:
        log.exception("it broke")
    assert stream.getvalue().count("\n") == 1
    assert "ValueError: invalid literal" in json.loads(stream.getvalue())["exception"]


def test_two_loggers_do_not_share_a_stream() -> None:
    first, second = io.StringIO(), io.StringIO()
    make_logger(first).info("one")
    make_logger(second).info("two")
    assert json.loads(first.getvalue())["event"] == "one"
    assert json.loads(second.getvalue())["event"] == "two"
