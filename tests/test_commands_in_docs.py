"""Every command that a document, an alert or a unit names exists, and so do its options there."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.named_tests import ROOT
from tests.test_manual import TREE, options_of

# Not CHANGELOG.md: of an earlier version it names what there was.
FILES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(each for each in (ROOT / "docs").rglob("*") if each.suffix in {".md", ".yml", ".conf", ".cfg"}),
        *(each for name in ("systemd", "relay/units") for each in (ROOT / name).rglob("*") if each.is_file()),
    ]
)

INLINE = re.compile(r"`((?:edge-)?(?:relay|kubelet) [^`]+)`")
LINE = re.compile(
    r"^\s*(?:ExecStart=)?(?:sudo (?:-u [\w-]+ )?)?(?:/[\w/-]+/)?((?:edge-)?(?:relay|kubelet) \S.*)$",
    re.MULTILINE,
)
FENCED = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
OPTION = re.compile(r"--?[a-z][\w-]*")

LINES_OF_THE_LOG = {"relay started", "relay ended"}
SIGNED_LABELS = {
    "edge-kubelet root",
    "edge-kubelet server roots",
    "edge-kubelet enrol request\\n",
    "edge-kubelet enrol response\\n",
}
NO_COMMANDS = LINES_OF_THE_LOG | SIGNED_LABELS


def named_commands(file: Path) -> list[str]:
    """Return the command lines that ``file`` names: quoted ones, and the lines of its examples."""
    text = file.read_text("utf-8").replace("\\\n", " ")
    examples = FENCED.findall(text) if file.suffix == ".md" else [text]
    lines = [line for each in examples for line in LINE.findall(each)]
    lines += [" ".join(each.split()) for each in INLINE.findall(FENCED.sub("", text))]
    return [part for line in lines if line not in NO_COMMANDS for part in commands_of(line)]


def commands_of(line: str) -> list[str]:
    """Return the commands of ours in ``line``, without its comment, redirections and other programs."""
    parts = re.split(r" (?:>|&&|;) | \| (?=(?:edge-)?(?:relay|kubelet) )", line.partition(" #")[0])
    names = (part.removeprefix("edge-") for part in parts)
    return [name for name in names if name.startswith(("relay ", "kubelet "))]


def called(words: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Return each command that ``words`` call, and the words that follow it; ``a | b`` are two."""
    name, *rest = words
    while rest and f"{name} {rest[0]}" in TREE and rest[1:2] != ["|"]:
        name, *rest = f"{name} {rest[0]}", *rest[1:]
    alternatives = 1 + 2 * len([word for word in rest if word == "|"])
    if alternatives == 1:
        yield name, rest
        return
    for word in rest[:alternatives:2]:
        yield f"{name} {word}", rest[alternatives:]


def unknown_words(line: str) -> list[str]:
    """Return the words of ``line``, a command line, that its program does not know."""
    unknown = []
    for name, rest in called(line.split()):
        if name not in TREE:
            unknown.append(name.rpartition(" ")[2])
            continue
        is_group = hasattr(TREE[name][0], "list_commands")
        unknown += [word for word in rest[:1] if is_group and re.fullmatch(r"[a-z][a-z-]*", word)]
        options = options_of(name) | {"-h", "--help", "--version"}
        unknown += [word for word in map(first_of, rest) if OPTION.fullmatch(word) and word not in options]
    return unknown


def first_of(word: str) -> str:
    """Return the option of ``--option=value`` or ``--option,``."""
    return re.split("[=,]", word)[0]


@pytest.mark.parametrize("file", FILES, ids=[str(file.relative_to(ROOT)) for file in FILES])
def test_every_command_that_a_file_names_exists(file: Path) -> None:
    found = {line: words for line in named_commands(file) if (words := unknown_words(line))}
    assert found == {}


@pytest.mark.parametrize(
    ("line", "unknown"),
    [
        ("relay node retire", ["retire"]),
        ("relay node label | retire | list", ["retire"]),
        ("relay ca list | revoke NODE", []),
        ("relay mcp", ["mcp"]),
        ("relay run --no-brokers --tls-own", ["--no-brokers"]),
        ("relay tools | call --kindz", ["--kindz", "--kindz"]),
        ("kubelet --install-completion", []),
    ],
)
def test_what_no_program_knows_is_found(line: str, unknown: list[str]) -> None:
    assert unknown_words(line) == unknown


def test_commands_are_found_where_documents_have_them() -> None:
    assert "relay ca init" in named_commands(ROOT / "README.md")
    assert "kubelet verify -" in named_commands(ROOT / "docs" / "operations.md")
    assert "relay ca rotate-root" in named_commands(ROOT / "docs" / "monitoring" / "alerts.yml")
    unit = named_commands(ROOT / "systemd" / "kubelet" / "edge-kubelet.service")
    assert [line for line in unit if line.startswith("kubelet run --state-dir")]
