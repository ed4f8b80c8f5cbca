"""What holds for every command of both programs: help, an example, ``-h``, ``--version`` and ``--json``."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer

import kubelet.cli.commands
import relay.cli.main

WIDTH = 80
BOUND_S = 60

PROGRAMS = {
    "kubelet": typer.main.get_command(kubelet.cli.commands.app),
    "relay": typer.main.get_command(relay.cli.main.app),
}

WITHOUT_JSON = {
    "relay run": "runs until it is stopped, and writes a log",
    "relay demo": "shows something to a person; --ready-file is for programs",
    "relay stdio": "its standard output is the protocol",
    "relay headers": "prints JSON and nothing else",
    "kubelet run": "runs until it is stopped, and writes a log",
    "kubelet mcp": "its standard output is the protocol",
    "kubelet fleet": "runs until it is stopped, and shows its progress to a person",
}


def walk(name: str, command: Any, context: Any = None) -> Iterator[tuple[str, Any, Any]]:
    """Return every command below ``command``, with the words that call it, and its context."""
    context = command.context_class(command, info_name=name.rpartition(" ")[2], parent=context)
    context.terminal_width = WIDTH
    yield name, command, context
    if hasattr(command, "list_commands"):
        for each in command.list_commands(context):
            yield from walk(f"{name} {each}", command.get_command(context, each), context)


TREE = {
    name: (command, context)
    for program in PROGRAMS
    for name, command, context in walk(program, PROGRAMS[program])
}
COMMANDS = sorted(name for name, (command, _) in TREE.items() if not hasattr(command, "list_commands"))


def help_of(name: str) -> str:
    command, context = TREE[name]
    text: str = command.get_help(context)
    return text


def options_of(name: str) -> set[str]:
    return {option for parameter in TREE[name][0].params for option in parameter.opts}


def example_of(name: str) -> list[str]:
    """Return the command lines of the example of a command."""
    text = (TREE[name][0].epilog or "").partition("Example:\n")[2].replace("\\\n", "")
    # Commands of a service run as its user; a node's have the name that Kubernetes has not.
    return [re.sub("^(sudo -u [a-z-]+ )?(edge-)?", "", line.strip()) for line in text.splitlines()]


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 35


@pytest.mark.parametrize("name", sorted(TREE))
def test_no_line_of_the_help_is_cut_or_too_wide(name: str) -> None:
    usage, *lines = help_of(name).splitlines()
    assert "…" not in usage
    # The parser's own mark of a text that it has cut.
    assert [line for line in lines if "…" in line or line.endswith("...")] == []
    assert [line for line in (usage, *lines) if len(line) > WIDTH] == []


@pytest.mark.parametrize("name", sorted(TREE))
def test_what_stands_for_a_value_is_no_type_of_python(name: str) -> None:
    assert re.findall(r"<[a-zA-Z].*?>", help_of(name)) == []


@pytest.mark.parametrize("name", sorted(TREE))
def test_every_option_has_a_help_text_and_a_command_a_summary(name: str) -> None:
    command = TREE[name][0]
    assert command.help
    assert [each.name for each in command.params if not (each.help or getattr(each, "hidden", False))] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_that_it_accepts(name: str) -> None:
    lines = example_of(name)
    assert lines
    for line in lines:
        assert line.startswith(name)
        command, context = TREE[name]
        command.make_context(name, shlex.split(line)[len(name.split()) :], parent=context.parent)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_writes_or_lists_has_json_or_a_reason(name: str) -> None:
    assert ("--json" in options_of(name)) is (name not in WITHOUT_JSON)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_thing_has_one_name(name: str) -> None:
    assert options_of(name).isdisjoint({"--ca", "--broker-ca", "--ttl-ms", "--ca-file"})


@pytest.mark.parametrize("name", COMMANDS)
def test_only_a_setting_that_the_file_can_turn_on_can_be_turned_off(name: str) -> None:
    negatable = {each.name for each in TREE[name][0].params if each.secondary_opts}
    assert negatable <= {"tls_own", "sign_in", "fetch_client_documents", "insecure_plain_transports"}


@pytest.mark.parametrize("program", sorted(PROGRAMS))
@pytest.mark.parametrize("arguments", [["-h"], ["config", "-h"], ["config", "show", "-h"], ["--version"]])
@pytest.mark.integration
def test_the_program_answers_for_itself(program: str, arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", program, *arguments],
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
        env={**os.environ, "COLUMNS": str(WIDTH)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{program} 0." if arguments == ["--version"] else "Usage: ")
