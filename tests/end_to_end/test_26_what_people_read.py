"""26. What the commands print for people is written in words, not in Python.

Steps: run every command that shows something, in a system that works.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.command_lines import CommandLines
from tests.fakes.demo import Demo
from tests.test_manual import COMMANDS, WITHOUT_JSON

PYTHON = re.compile(r"\b(?:True|False|None)\b")

SHOWN = {
    "kubelet config check": "--relay {url} --no-broker --config {state}/kubelet.toml",
    "kubelet config show": "--config {state}/kubelet.toml",
    "kubelet doctor": "",
    "kubelet init": "",
    "kubelet kind list": "",
    "kubelet kinds show": "linux.journal",
    "kubelet service status": "",
    "kubelet status": "",
    "kubelet verify": "{manifest}",
    "relay audit grep": "node_id={node}",
    "relay audit tail": "",
    "relay audit verify": "",
    "relay ca list": "",
    "relay ca roots": "",
    "relay call": "sysecho-invoke "
    '\'{{"node": "{node}", "message": "hello"}}\' --url {url} --token-file {token}',
    "relay config check": "",
    "relay config show": "",
    "relay doctor": "",
    "relay fleet nodes": "--tenant demo --url {url}",
    "relay fleet tools": "--tenant demo --url {url}",
    "relay join-token list": "",
    "relay node list": "",
    "relay node show": "{node}",
    "relay people list": "--state-dir {people}",
    "relay people show": "ada --state-dir {people}",
    "relay service status": "",
    "relay state show": "leaf",
    "relay kind list": "",
    "relay status": "",
    "relay token list": "",
    "relay tools": "--url {url} --token-file {token}",
}
"""The commands that show something, and what they are given."""

CHANGING = {
    "kubelet announce",
    "kubelet enroll",
    "kubelet kind allow-device",
    "kubelet kind install",
    "kubelet kind new",
    "kubelet kind uninstall",
    "kubelet kinds disable",
    "kubelet kinds enable",
    "kubelet retire",
    "kubelet service install",
    "kubelet service uninstall",
    "relay ca backup",
    "relay ca init",
    "relay ca issue",
    "relay ca issue-reader",
    "relay ca issue-server",
    "relay ca restore",
    "relay ca revoke",
    "relay ca rotate-root",
    "relay cluster add",
    "relay cluster init",
    "relay cluster remove",
    "relay cluster renew",
    "relay cluster seal",
    "relay cluster streams",
    "relay connect",
    "relay join-token create",
    "relay join-token revoke",
    "relay kind install",
    "relay kind uninstall",
    "relay login",
    "relay node forget",
    "relay node label",
    "relay node tag",
    "relay people invite",
    "relay people reset",
    "relay people revoke",
    "relay service install",
    "relay service uninstall",
    "relay token issue",
    "relay token revoke",
    "relay token rotate-key",
}
"""The commands that change something, and say what in a sentence."""

ANYWHERE = {"service status", "call", "tools"}
"""The commands without a state directory."""


def test_each_command_shows_something_or_changes_something() -> None:
    assert SHOWN.keys() | CHANGING == set(COMMANDS) - WITHOUT_JSON.keys()
    assert not SHOWN.keys() & CHANGING


def run(program: str, *words: str) -> bytes:
    command = [sys.executable, "-P", "-m", program, *words]
    return subprocess.run(command, check=True, capture_output=True, timeout=60).stdout


@pytest.fixture(scope="module")
def given(demo: Demo, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What stands in the commands: names of the demo, and files that are made of it."""
    directory = tmp_path_factory.mktemp("read")
    token, manifest = directory / "token", directory / "manifest.json"
    token.write_text(demo.facts["token"])
    token.chmod(0o600)
    own = ("--state-dir", str(demo.state("kubelet")))
    manifest.write_bytes(run("kubelet", "announce", "--dry-run", *own))
    # Elsewhere: with a person the demo would be an authorization server.
    people = ("--state-dir", str(directory / "people"))
    run("relay", "ca", "init", *people)
    run("relay", "people", "invite", "ada", "--public-url", "https://hub.example", *people)
    return {
        "state": str(demo.directory),
        "node": demo.real_node,
        "url": demo.base_url,
        "token": str(token),
        "manifest": str(manifest),
        "people": people[1],
    }


@pytest.mark.parametrize("command", sorted(SHOWN))
def test_what_a_command_shows_is_in_words(
    command: str,
    given: dict[str, str],
    commands: CommandLines,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The pins of tools are its user's, and another demo may have had the same port.
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    program, name = command.split(" ", 1)
    words = shlex.split(SHOWN[command].format(**given))
    has_place = name in ANYWHERE or "--state-dir" in words
    place = [] if has_place else ["--state-dir", f"{given['state']}/{program}"]
    # Whatever it has found.
    ended = commands.run(program, *name.split(), *words, *place)
    assert ended.code in {0, 1}, ended
    assert ended.out + ended.err
    assert PYTHON.findall(ended.out + ended.err) == []
