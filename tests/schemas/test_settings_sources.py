import os
from pathlib import Path

import pytest

import schemas.settings_sources
from schemas.error_roots import ConfigError
from schemas.kinds import kind_name
from schemas.process.cli_config import as_toml
from schemas.settings import Form, Setting, list_of, parse_flag, whole_number
from schemas.settings_sources import Program, Sources, read_sources

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
    monkeypatch.setattr(schemas.settings_sources, "CONFIG_DIRECTORY", tmp_path)
    assert read(None).file is None
    read(file, "agent_rps = 7")
    assert read(None).settings()[AGENT_RPS] == 7
    other = tmp_path / "other.toml"
    read(other, "agent_rps = 8")
    assert read(None, RELAY_CONFIG=str(other)).settings()[AGENT_RPS] == 8
    assert read(None, RELAY_CONFIG="").settings()[AGENT_RPS] == 300


def test_one_setting_that_is_given_elsewhere_does_not_need_the_file(file: Path) -> None:
    broken = read(file, "listen =", RELAY_AGENT_RPS="5")
    assert broken.value(AGENT_RPS) == 5
    with pytest.raises(ConfigError, match="is not TOML"):
        broken.value(LISTEN)
    assert read(file, "agent_rps = 6").value(AGENT_RPS) == 6
    assert read(file, "").value(LISTEN) is None
