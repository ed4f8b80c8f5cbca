import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kubelet.settings import KUBELET

BOUND_S = 60
WHERE = 'relay = "https://relay.example"\nbroker = "mqtts://mqtt.example"\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kubelet.toml"
    path.write_text(f'{WHERE}state_dir = "{tmp_path}"\n')
    path.chmod(0o644)
    return path


def kubelet(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "kubelet", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=BOUND_S, check=False)


@pytest.mark.integration
def test_a_configuration_that_can_be_used_is_valid(file: Path) -> None:
    done = kubelet("config", "check", "--config", file)
    valid, *given = done.stdout.splitlines()
    assert (done.returncode, valid, done.stderr) == (0, f"valid: {file}", "")
    assert sorted(line.split()[0] for line in given) == ["broker", "relay", "state_dir"]


@pytest.mark.integration
def test_every_problem_is_a_line_and_the_exit_code_is_that_of_the_daemon(file: Path) -> None:
    file.write_text('tll = "1h"\nheartbeat = "fast"\n')
    done = kubelet("config", "check", "--config", file, "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["valid"]) == (78, False)
    assert found["problems"][0] == f"{file}, line 1: there is no setting tll; the nearest is ttl"
    assert found["problems"][1].startswith(f"{file}, line 2: heartbeat 'fast' is not a duration")
    assert kubelet("run", "--config", file).returncode == 78


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
def test_a_table_of_the_ceiling_that_cannot_be_used_ends_a_start(file: Path, table: str, said: str) -> None:
    file.write_text(f"{file.read_text()}{table}\n")
    done = kubelet("run", "--config", file)
    assert (done.returncode, done.stderr.count("\n")) == (78, 1)
    assert said in done.stderr


@pytest.mark.integration
def test_a_table_of_the_ceiling_stands_in_the_file_alone(file: Path) -> None:
    file.write_text(f'{file.read_text()}["linux.journal"]\nunits = ["nginx*", "!a"]\n')
    shown = kubelet("config", "show", "--config", file).stdout
    assert tomllib.loads(shown)["linux.journal"] == {"units": ["nginx*", "!a"]}
    assert kubelet("run", "--config", file, "--linux.journal", "{}").returncode == 2
    environment = {**os.environ, "KUBELET_LINUX.JOURNAL": "{}"}
    command = [sys.executable, "-P", "-m", "kubelet", "config", "check"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=BOUND_S, check=False
    )
    assert (done.returncode, "there is no variable KUBELET_LINUX.JOURNAL" in done.stderr) == (78, True)


@pytest.mark.integration
def test_a_node_that_is_not_enrolled_is_found_by_the_check(tmp_path: Path) -> None:
    done = kubelet("config", "check", "--state-dir", tmp_path)
    assert (done.returncode, "enrol first" in done.stderr) == (78, True)


@pytest.mark.integration
def test_kinds_are_read_before_a_node_is_enrolled(tmp_path: Path) -> None:
    done = kubelet("config", "check", "--state-dir", tmp_path, "--kinds", "acme.absent", "--json")
    enrol, kind = json.loads(done.stdout)["problems"]
    assert (done.returncode, enrol[:11]) == (78, "enrol first")
    assert kind.startswith("kinds: acme.absent: no installed package")


@pytest.mark.integration
def test_what_holds_is_shown_with_where_it_stands(file: Path) -> None:
    shown = kubelet("config", "show", "--config", file, "--ttl", "1h").stdout
    assert tomllib.loads(shown)["ttl"] == "1h"
    assert "# --ttl" in shown
    document = json.loads(kubelet("config", "show", "--config", file, "--json").stdout)
    assert document.keys() == {setting.name for setting in KUBELET.table}
    assert document["ttl"] == {"value": "15m", "source": "default", "reloads": True}
