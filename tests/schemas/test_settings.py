import json
import os
from enum import Enum
from pathlib import Path

import pytest

import schemas.settings
from schemas.error_roots import ConfigError, OperatorError
from schemas.kinds import kind_name
from schemas.process.cli_config import as_toml
from schemas.settings import (
    Form,
    Given,
    Program,
    Setting,
    Settings,
    Sources,
    list_of,
    one_of,
    parse_flag,
    parse_path,
    read_sources,
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


def test_a_setting_that_has_no_default_can_be_taken_out_by_a_reload() -> None:
    level = Setting("level", one_of(Mode), "A level.", reloads=True)
    reloaded = Settings((level,), [{"level": Given("off", "file")}]).reloaded(Settings((level,), []))
    assert (reloaded.applied, reloaded.settings.get(level)) == ({"level": "not set"}, None)


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


LISTEN = Setting("listen", str, "Where to serve.", "HOST:PORT")
AGENT_RPS = Setting("agent_rps", whole_number(1, 1000), "Calls.", "N", "300", Form.NUMBER)
TLS_OWN = Setting("tls_own", parse_flag, "TLS.", default="false", form=Form.FLAG)
KINDS = Setting("kinds", list_of(kind_name), "Kinds.", "NAME,...", form=Form.LIST)
RELAY = Program("relay", (LISTEN, AGENT_RPS, TLS_OWN, KINDS))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "relay.toml"


def read(file: Path | None, text: str = "", **environment: str) -> Sources:
    if file is not None:
        file.write_text(text)
        file.chmod(0o644)
    return read_sources(RELAY, {}, file, environment)


def problem_of(sources: Sources) -> str:
    with pytest.raises(ConfigError) as caught:
        sources.settings()
    [problem] = caught.value.problems
    assert problem.isprintable()
    return problem


def test_the_file_is_overridden_by_the_environment_and_that_by_flags(file: Path) -> None:
    file.write_text('listen = "a"\nagent_rps = 1\n\ntls_own = true\n')
    environment = {"RELAY_LISTEN": "b", "RELAY_AGENT_RPS": "2", "PATH": "/bin", "RELAYS": "x"}
    settings = read_sources(RELAY, {"listen": "c"}, file, environment).settings()
    assert (settings[LISTEN], settings[AGENT_RPS], settings[TLS_OWN]) == ("c", 2, True)
    assert settings.get(KINDS) is None
    assert [settings.given[each.name].source for each in (LISTEN, AGENT_RPS, TLS_OWN)] == [
        "--listen",
        "RELAY_AGENT_RPS",
        f"{file}, line 4",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('\nlistne = "a"', ", line 2: there is no setting listne; the nearest is listen"),
        ("tls-own = true", ", line 1: there is no setting tls-own; the nearest is tls_own"),
        ("[relay]\nlisten = 'a'", ", line 1: there is no setting relay; the nearest is listen"),
        ('"\\u001b" = 1', ": there is no setting \\x1b; the nearest is "),
        ("listen = 8700", ', line 1: listen is text in quotes: "…"'),
        ("listen = ['a']", ', line 1: listen is text in quotes: "…"'),
        ("agent_rps = '300'", ", line 1: agent_rps is a whole number"),
        ("agent_rps = true", ", line 1: agent_rps is a whole number"),
        ("agent_rps = 0", ", line 1: agent_rps '0' is not a whole number from 1 to 1000"),
        ("tls_own = 'true'", ", line 1: tls_own is true or false"),
        ("tls_own = 1", ", line 1: tls_own is true or false"),
        ("kinds = 1", ', line 1: kinds is an array of texts: ["…", "…"]'),
        ("kinds = ['acme.a', 1]", ', line 1: kinds is an array of texts: ["…", "…"]'),
        ("kinds = ['acme.a,acme.b']", ', line 1: kinds is an array of texts: ["…", "…"]'),
        ("kinds = ['acme']", ", line 1: kinds 'acme' is not the name of a kind, such as acme.relay_board"),
        ("kinds = ['acme.a', 'acme.a']", ", line 1: kinds names 'acme.a' twice"),
        ("listen = a", " is not TOML: Invalid value (at line 1, column 10)"),
        ("listen = 'a'\nlisten = 'b'", " is not TOML: Cannot overwrite a value"),
        ("x = " + "[" * 5000, " is not TOML"),
        ("x = " + "9" * 5000, " is not TOML"),
    ],
)
def test_a_mistake_in_the_file_is_named_with_its_line(file: Path, text: str, problem: str) -> None:
    found = problem_of(read(file, text))
    assert found.startswith(f"{file}{problem}")


def test_a_list_is_an_array_in_the_file_and_has_commas_elsewhere(file: Path) -> None:
    sources = read(file, 'kinds = ["acme.a", "acme.b"]')
    assert sources.settings().get(KINDS) == ("acme.a", "acme.b")
    assert list(as_toml(sources.settings()))[-1].startswith('kinds = ["acme.a", "acme.b"]')
    assert read(file, "kinds = []").settings().get(KINDS) == ()
    assert read(None, RELAY_CONFIG="", RELAY_KINDS="acme.a, acme.b").value(KINDS) == ("acme.a", "acme.b")
    assert read_sources(RELAY, {"kinds": ""}, file, {}).settings().get(KINDS) == ()


def test_every_unknown_key_is_named(file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(file, "a = 1\nb = 2").settings()
    assert len(caught.value.problems) == 2


def test_a_variable_that_is_no_setting_is_refused(file: Path) -> None:
    sources = read(file, RELAY_LISTNE="a")
    assert problem_of(sources).endswith("there is no variable RELAY_LISTNE; the nearest is RELAY_LISTEN")


def test_a_file_that_is_not_text_is_refused(file: Path) -> None:
    file.write_bytes(b"\xff")
    assert "is not text in UTF-8" in problem_of(read_sources(RELAY, {}, file, {}))


def test_a_file_that_is_too_large_is_refused(file: Path) -> None:
    assert "too large" in problem_of(read(file, "#" * 70_000)).lower()


@pytest.mark.parametrize("mode", [0o666, 0o664, 0o602])
def test_a_file_that_others_can_change_is_refused(file: Path, mode: int) -> None:
    file.touch()
    file.chmod(mode)
    assert "can be changed by others: chmod go-w" in problem_of(read_sources(RELAY, {}, file, {}))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(file: Path) -> None:
    file.touch(0o644)
    os.chown(file, 12345, -1)
    assert "belongs to user 12345" in problem_of(read_sources(RELAY, {}, file, {}))


def test_a_link_is_followed(file: Path, tmp_path: Path) -> None:
    read(file, "agent_rps = 7")
    link = tmp_path / "link.toml"
    link.symlink_to(file)
    assert read_sources(RELAY, {}, link, {}).settings()[AGENT_RPS] == 7


def test_a_pipe_is_refused_and_not_waited_for(file: Path) -> None:
    os.mkfifo(file, 0o600)
    assert "is no regular file" in problem_of(read_sources(RELAY, {}, file, {}))


def test_a_file_that_was_named_has_to_be_there(file: Path) -> None:
    for sources in (
        read_sources(RELAY, {}, file, {}),
        read_sources(RELAY, {}, None, {"RELAY_CONFIG": str(file)}),
    ):
        assert problem_of(sources) == f"{file}: No such file or directory"


def test_the_usual_file_is_read_if_it_is_there_unless_another_or_none_is_named(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert RELAY.usual_file == Path("/etc/edge-kubelet/relay.toml")
    monkeypatch.setattr(schemas.settings, "CONFIG_DIRECTORY", tmp_path)
    assert read(None).file is None
    read(file, "agent_rps = 7")
    assert read(None).settings()[AGENT_RPS] == 7
    other = tmp_path / "other.toml"
    read(other, "agent_rps = 8")
    assert read(None, RELAY_CONFIG=str(other)).settings()[AGENT_RPS] == 8
    assert read(None, RELAY_CONFIG="").settings()[AGENT_RPS] == 300


@pytest.mark.parametrize("there", [True, False], ids=["there", "taken away"])
def test_the_usual_file_is_not_read_nor_missed_in_a_directory_that_others_can_change(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch, *, there: bool
) -> None:
    monkeypatch.setattr(schemas.settings, "CONFIG_DIRECTORY", tmp_path)
    if there:
        read(file, "agent_rps = 7")
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match=f"{tmp_path} can be changed by others: chmod go-w {tmp_path}"):
        read(None).settings()
    assert read(None, RELAY_CONFIG="").settings()[AGENT_RPS] == 300


def test_one_setting_that_is_given_elsewhere_does_not_need_the_file(file: Path) -> None:
    broken = read(file, "listen =", RELAY_AGENT_RPS="5")
    assert broken.value(AGENT_RPS) == 5
    with pytest.raises(ConfigError, match="is not TOML"):
        broken.value(LISTEN)
    assert read(file, "agent_rps = 6").value(AGENT_RPS) == 6
    assert read(file, "").value(LISTEN) is None
