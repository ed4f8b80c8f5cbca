import json
from enum import Enum
from pathlib import Path

import pytest

from schemas.error_roots import ConfigError, OperatorError
from schemas.settings import (
    Form,
    Given,
    Setting,
    Settings,
    list_of,
    one_of,
    parse_flag,
    parse_path,
    settings_of,
    whole_number,
)


class Mode(Enum):
    ON = "on"
    OFF = "off"


PORT = Setting("port", whole_number(1, 65_535), "Where to serve.", "PORT", "8700", Form.NUMBER)
MODE = Setting("log_mode", one_of(Mode), "How to log.", "on|off", reloads=True)
TABLE = (PORT, MODE)


def test_the_names_of_a_setting_follow_from_one() -> None:
    assert (MODE.flag, MODE.variable("RELAY_")) == ("--log-mode", "RELAY_LOG_MODE")


def test_a_later_source_overrides_an_earlier_one() -> None:
    settings = Settings(TABLE, [{"port": Given("1", "file")}, {"port": Given("2", "--port")}])
    assert (settings[PORT], settings.given["port"].source) == (2, "--port")


def test_without_a_source_there_is_the_default_or_nothing() -> None:
    settings = Settings(TABLE, [])
    assert (settings[PORT], settings.given["port"].source) == (8700, "default")
    assert settings.get(MODE) is None


def test_a_value_that_is_overridden_is_not_parsed() -> None:
    assert Settings(TABLE, [{"port": Given("x", "file")}, {"port": Given("2", "--port")}])[PORT] == 2


def test_all_that_is_wrong_is_reported_with_its_place() -> None:
    sources = [{"port": Given("x", "/etc/a.toml, line 3"), "log_mode": Given("of", "A_LOG_MODE")}]
    with pytest.raises(ConfigError) as caught:
        Settings(TABLE, sources, ["there is no setting prot"])
    assert caught.value.problems == (
        "there is no setting prot",
        "/etc/a.toml, line 3: port 'x' is not a whole number from 1 to 65535",
        "A_LOG_MODE: log_mode 'of' is none of on, off; the nearest is off",
    )
    assert str(caught.value) == "there is no setting prot (and 2 more: see `config check`)"


def test_a_reload_takes_what_reloads_and_names_what_needs_a_restart() -> None:
    old = Settings(TABLE, [{"log_mode": Given("on", "file")}])
    new = Settings(TABLE, [{"log_mode": Given("off", "file"), "port": Given("1", "file")}])
    reloaded = old.reloaded(new)
    assert (reloaded.applied, reloaded.need_restart) == ({"log_mode": "off"}, ["port"])
    assert (reloaded.settings[PORT], reloaded.settings.get(MODE)) == (8700, Mode.OFF)
    # Until the restart each reload names it again.
    again = reloaded.settings.reloaded(new)
    assert (again.applied, again.need_restart) == ({}, ["port"])


def test_a_reload_compares_values_and_not_how_they_are_given() -> None:
    old = Settings(TABLE, [{"log_mode": Given("on", "file")}])
    same = Settings(TABLE, [{"log_mode": Given("on", "--log-mode"), "port": Given("08700", "file")}])
    reloaded = old.reloaded(same)
    assert (reloaded.applied, reloaded.need_restart) == ({}, [])


def test_a_setting_that_reloads_returns_to_its_default() -> None:
    level = Setting("level", one_of(Mode), "A level.", default="on", reloads=True)
    old = Settings((level,), [{"level": Given("off", "file")}])
    assert old.reloaded(Settings((level,), [])).applied == {"level": "on"}


def test_settings_are_made_again_of_what_is_told_of_them() -> None:
    settings = Settings(TABLE, [{"log_mode": Given("on", "file")}])
    again = settings_of(TABLE, json.loads(json.dumps(settings.serialized())))
    assert again.given == settings.given
    assert again.reloaded(settings).applied == {}


def test_a_path_that_is_told_is_one_in_every_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    key = Setting("key", parse_path, "A key.", "FILE")
    settings = Settings((key,), [{"key": Given("tls.key", "--key")}])
    assert settings.serialized() == {"key": {"text": str(tmp_path / "tls.key"), "source": "--key"}}


@pytest.mark.parametrize("text", ["", "-1", "0", "65536", "1.0", "1_0", " 1", "٣", "1e3", "9" * 30, "nan"])
def test_a_number_is_decimal_digits_within_its_bounds(text: str) -> None:
    with pytest.raises(OperatorError, match="whole number from 1 to 65535"):
        PORT.parse(text)


@pytest.mark.parametrize("text", ["", "yes", "True", "1"])
def test_a_flag_is_true_or_false_and_nothing_else(text: str) -> None:
    assert (parse_flag("true"), parse_flag("false")) == (True, False)
    with pytest.raises(OperatorError, match="neither true nor false"):
        parse_flag(text)


def test_a_path_is_not_empty() -> None:
    assert parse_path("/a/b") == Path("/a/b")
    for text in ("", "a\0b"):
        with pytest.raises(OperatorError, match="is not a path"):
            parse_path(text)


def test_what_a_list_names_twice_is_shown_once_all_of_it_could_be_parsed() -> None:
    parse = list_of(parse_flag)
    assert parse(" true , false ") == (True, False)
    assert parse(" ") == ()
    with pytest.raises(OperatorError, match=r"^names 'true' twice$"):
        parse("true,false,true")
    with pytest.raises(OperatorError, match=r"^'other' is neither true nor false$"):
        parse("other,other")
