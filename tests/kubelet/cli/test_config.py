import tomllib
from pathlib import Path

import pytest

from kubelet.settings import KUBELET
from tests.fakes.node_command import CONFIG, DONE, USAGE, Run

WHERE = 'relay = "https://relay.example"\nbroker = "mqtts://mqtt.example"\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kubelet.toml"
    path.write_text(f'{WHERE}state_dir = "{tmp_path}"\n')
    path.chmod(0o644)
    return path


def test_a_configuration_that_can_be_used_is_valid(run: Run, file: Path) -> None:
    ran = run("config", "check", "--config", file)
    valid, *given = ran.out.decode().splitlines()
    assert (ran.code, valid, ran.err) == (DONE, f"valid: {file}", "")
    assert sorted(line.split()[0] for line in given) == ["broker", "relay", "state_dir"]


@pytest.mark.integration
def test_every_problem_is_a_line_and_the_exit_code_is_that_of_the_daemon(run: Run, file: Path) -> None:
    file.write_text('tll = "1h"\nheartbeat = "fast"\n')
    ran = run("config", "check", "--config", file, "--json")
    assert (ran.code, ran.facts["valid"]) == (CONFIG, False)
    unknown, wrong = ran.facts["problems"]
    assert unknown == f"{file}, line 1: there is no setting tll; the nearest is ttl"
    assert wrong.startswith(f"{file}, line 2: heartbeat 'fast' is not a duration")
    assert run("run", "--config", file).code == CONFIG


@pytest.mark.integration
@pytest.mark.parametrize(
    ("table", "said"),
    [
        ('["linux.journal"]\nunit = ["a"]', "line 4: linux.journal 'unit' is none of units"),
        (
            '["linux.jornal"]\nunits = ["a"]',
            "line 4: there is no setting linux.jornal; the nearest is linux.journal",
        ),
        ('[linux.journal]\nunits = ["a"]', 'write ["linux.journal"], with quotes'),
        ('["linux.journal"]\nunits = [2026-11-26]', "line 4: linux.journal units is an array of patterns"),
        ('["linux.journal"]\nunits = 1\n["linux.journal"]', "is not TOML"),
        ('"linux.journal" = ["a"]', "line 4: linux.journal is a table"),
    ],
)
def test_a_table_of_the_ceiling_that_cannot_be_used_ends_a_start(
    run: Run, file: Path, table: str, said: str
) -> None:
    file.write_text(f"{file.read_text()}{table}\n")
    ran = run("run", "--config", file)
    assert (ran.code, ran.said_in_one_line(said)) == (CONFIG, True)


@pytest.mark.integration
def test_a_table_of_the_ceiling_stands_in_the_file_alone(
    run: Run, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(f'{file.read_text()}["linux.journal"]\nunits = ["nginx*", "!a"]\n')
    shown = run("config", "show", "--config", file).out.decode()
    assert tomllib.loads(shown)["linux.journal"] == {"units": ["nginx*", "!a"]}
    assert run("run", "--config", file, "--linux.journal", "{}").code == USAGE
    monkeypatch.setenv("KUBELET_LINUX.JOURNAL", "{}")
    ran = run("config", "check")
    assert (ran.code, "there is no variable KUBELET_LINUX.JOURNAL" in ran.err) == (CONFIG, True)


def test_a_node_that_is_not_enrolled_is_found_by_the_check(run: Run, tmp_path: Path) -> None:
    ran = run("config", "check", "--state-dir", tmp_path)
    assert (ran.code, "enrol first" in ran.err) == (CONFIG, True)


def test_kinds_are_read_before_a_node_is_enrolled(run: Run, tmp_path: Path) -> None:
    ran = run("config", "check", "--state-dir", tmp_path, "--kinds", "acme.absent", "--json")
    enrol, kind = ran.facts["problems"]
    assert (ran.code, enrol[:11]) == (CONFIG, "enrol first")
    assert kind.startswith("kinds: acme.absent: no installed package")


def test_what_holds_is_shown_with_where_it_stands(run: Run, file: Path) -> None:
    shown = run("config", "show", "--config", file, "--ttl", "1h").out.decode()
    assert tomllib.loads(shown)["ttl"] == "1h"
    assert "# --ttl" in shown
    document = run("config", "show", "--config", file, "--json").facts
    assert document.keys() == {setting.name for setting in KUBELET.table}
    assert document["ttl"] == {"value": "15m", "source": "default", "reloads": True}
