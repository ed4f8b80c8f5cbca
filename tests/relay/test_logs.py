import io
import json

from relay.logs import make_logger


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_away_from_a_terminal_an_event_is_one_line_of_json() -> None:
    stream = io.StringIO()
    make_logger(stream).warning("node refused", reason="a\nb")
    line = json.loads(stream.getvalue())
    assert stream.getvalue().count("\n") == 1
    assert (line["event"], line["level"], line["reason"]) == ("node refused", "warning", "a\nb")
    assert line["timestamp"].endswith("Z")


def test_on_a_terminal_an_event_is_a_line_for_people() -> None:
    stream = Terminal()
    make_logger(stream).info("broker connected", broker="127.0.0.1:1883")
    assert "broker connected" in stream.getvalue()
    assert not stream.getvalue().startswith("{")


def test_what_only_developers_need_is_not_logged() -> None:
    stream = io.StringIO()
    make_logger(stream).debug("detail")
    assert stream.getvalue() == ""


def test_two_loggers_write_apart() -> None:
    one, other = io.StringIO(), io.StringIO()
    make_logger(one).info("one")
    make_logger(other).info("other")
    assert json.loads(one.getvalue())["event"] == "one"
    assert json.loads(other.getvalue())["event"] == "other"
