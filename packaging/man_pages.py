"""``make man``: writes ``edge-kubelet.1`` and ``edge-relay.1``, from the commands and tables of settings.

Each also by its short name, as a page that shows it. Must not describe a command: each describes itself.
"""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import typer

import kubelet.cli.commands
import relay.cli.main
from kubelet.settings import KUBELET
from relay.settings.table import RELAY
from schemas.settings import Program, Setting

_PROGRAMS: tuple[tuple[Program, typer.Typer], ...] = (
    (KUBELET, kubelet.cli.commands.app),
    (RELAY, relay.cli.main.app),
)
_BOTH = (KUBELET, RELAY)
_EXITS = (
    (_BOTH, "0", "Done."),
    (_BOTH, "1", "The answer is no."),
    (_BOTH, "2", "The command line is wrong."),
    (_BOTH, "3", "It cannot run as things are: a file is missing or exposed, a port is taken."),
    ((RELAY,), "4", "A loss that `edge-relay audit verify` has found."),
    (
        (RELAY,),
        "10 to 14",
        "Of `edge-relay call`: timeout, unauthorized, not found, invalid arguments, failure of the provider.",
    ),
    (_BOTH, "70", "A fault of the program itself."),
    (_BOTH, "78", "The settings cannot be used; a restart does not help."),
    (_BOTH, "130", "A signal has ended it before it had an answer."),
)


def main(directory: Path) -> None:
    """Write a page for each program to ``directory``, which is for them alone: wheel and package take all."""
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.glob("*.1"):
        old.unlink()
    for program, app in _PROGRAMS:
        name = f"edge-{program.name}"
        page = "\n".join(_page(name, program, typer.main.get_command(app))) + "\n"
        (directory / f"{name}.1").write_text(page, "utf-8")
        (directory / f"{program.name}.1").write_text(f".so man1/{name}.1\n", "utf-8")


def _page(name: str, program: Program, root: Any) -> Iterator[str]:
    context = root.context_class(root, info_name=name)
    # As builds that can be repeated have it.
    built = datetime.fromtimestamp(int(os.environ.get("SOURCE_DATE_EPOCH", time.time())), UTC)
    yield f'.TH {name.upper()} 1 "{built:%Y-%m-%d}" "edge-kubelet {version("edge-kubelet")}" "Edge kubelet"'
    yield from (".SH NAME", _escaped(f"{name} - {root.help.partition(':')[0]}"))
    yield from (".SH SYNOPSIS", f".B {name}", _escaped("COMMAND [OPTIONS]"))
    yield from (".SH DESCRIPTION", _escaped(root.help))
    yield ".SH COMMANDS"
    for words, command, its_context in _commands(name, root, context):
        yield f'.SS "{_escaped(words)}"'
        yield from _command(command, its_context)
    yield ".SH CONFIGURATION"
    yield _escaped(
        f"Each option of `{name} run` is also a key of {program.usual_file}, and a variable. The command "
        "line overrides the environment, and that the file."
    )
    for setting in program.table:
        yield from (
            ".TP",
            ", ".join(f"\\fB{_escaped(each)}\\fR" for each in _names(program, setting)),
        )
        default = f" Default: {setting.default}." if setting.default is not None else ""
        yield _escaped(setting.doc + default)
    yield ".SH FILES"
    yield from (".TP", f"\\fI{_escaped(str(program.usual_file))}\\fR", "The settings.")
    yield ".SH EXIT STATUS"
    for programs, status, meaning in _EXITS:
        if program in programs:
            yield from (".TP", f"\\fB{status}\\fR", _escaped(meaning))


def _names(program: Program, setting: Setting[Any]) -> Sequence[str]:
    return (setting.name, setting.variable(program.prefix)) if setting in program.options else (setting.name,)


def _commands(words: str, group: Any, context: Any) -> Iterator[tuple[str, Any, Any]]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command.hidden:
            continue
        its_context = command.context_class(command, info_name=name, parent=context)
        if hasattr(command, "list_commands"):
            yield from _commands(f"{words} {name}", command, its_context)
        else:
            yield f"{words} {name}", command, its_context


def _command(command: Any, context: Any) -> Iterator[str]:
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"\\fB{_escaped(context.command_path)}\\fR {_escaped(usage)}"
    for paragraph in (command.help or "").split("\n\n"):
        yield from (".PP", _escaped(" ".join(paragraph.split())))
    for parameter in command.get_params(context):
        if (record := parameter.get_help_record(context)) is not None:
            yield from (".TP", f"\\fB{_escaped(record[0])}\\fR", _escaped(record[1]))
    example = (command.epilog or "").partition("Example:\n")[2]
    if example:
        yield from (
            ".PP",
            "Example:",
            ".PP",
            ".nf",
            *(_escaped(line) for line in example.splitlines()),
            ".fi",
        )


def _escaped(text: str) -> str:
    """Return ``text`` so that roff prints it as it is: no request at its beginning, and ASCII hyphens."""
    safe = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{safe}" if safe[:1] in {".", "'"} else safe


if __name__ == "__main__":
    main(Path(sys.argv[1]))
