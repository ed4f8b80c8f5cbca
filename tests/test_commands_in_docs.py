"""Every command that a document, an alert or a unit names exists, and so do its options there."""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.fakes.guide import ROOT
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
BLOCK = re.compile(r"<!-- on: (\w+)[^>]*-->\n```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINKS = ROOT / "docs" / "maintainers" / "links.md"
FIGURES = ROOT / "docs" / "performance.md"
MEASURED = re.compile(
    r"^Measured by `\.venv/bin/python -P -m bench (\w+)`, commit `[0-9a-f]{8}`, \d{4}-\d\d-\d\d, [^\n]+:"
    r"\n\n(?:\||```text$)",
    re.MULTILINE,
)
MOST_WORDS, MOST_WORDS_OF_THE_FIRST = 30_000, 20_000
NEW_PAGES = {
    "compare.md",
    "compatibility.md",
    "faq.md",
    "performance.md",
    "security.md",
    "sign-in.md",
    "upgrade.md",
}
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


UNTYPED: Mapping[str, str] = {}
"""Commands of ours that documents name and no test types, each with the reason."""

FOREIGN: Mapping[str, str] = {}
"""Programs of others that documents have in their examples and no test types, each with the reason."""

PAGES = [file for file in FILES if file.suffix == ".md" and "decisions" not in file.parts]
SHELL = re.compile(r"^```(?:sh)?\n(.*?)^```", re.MULTILINE | re.DOTALL)


@cache
def typed() -> str:
    """Return the sources of all tests, and what they type of the documents, without quotes and commas."""
    sources = [
        file.read_text("utf-8")
        for file in (ROOT / "tests").rglob("*.py")
        if "node_modules" not in file.parts and file.name != Path(__file__).name
    ]
    stories = [line for page in PAGES for block in BLOCK.findall(page.read_text("utf-8")) for line in block]
    return re.sub(r"[\s\"',\[\]()*]+", " ", " ".join([*sources, *stories]))


def test_every_command_of_ours_in_a_page_is_typed_by_a_test_or_has_its_reason() -> None:
    named = {
        name
        for page in PAGES
        for line in named_commands(page)
        for name, _ in called(line.split())
        if name in TREE and " " in name and not hasattr(TREE[name][0], "list_commands")
    }
    assert {name for name in named if f" {name.partition(' ')[2]} " not in typed()} == UNTYPED.keys()


def test_every_program_of_others_in_a_page_is_typed_by_a_test_or_has_its_reason() -> None:
    named = {
        re.sub(r"^(?:sudo )", "", line).split()[0]
        for page in PAGES
        for block in SHELL.findall(page.read_text("utf-8"))
        for line in block.splitlines()
        if re.match(r"[a-z][\w-]* \S", line)
    }
    ours = {"relay", "kubelet", "edge-kubelet", "edge-relay"}
    assert {name for name in named - ours if not re.search(rf"\b{name} ", typed())} == FOREIGN.keys()


def test_every_address_in_a_page_is_in_the_list_of_those_that_were_seen() -> None:
    listed = dict(re.findall(r"^\| <(\S+)> \| (\d{4}-\d\d-\d\d) \|$", LINKS.read_text("utf-8"), re.MULTILINE))
    linked = {
        link
        for page in {*PAGES, ROOT / "SECURITY.md"} - {LINKS}
        for link in re.findall(r"\]\((https?://[^)\s]+)\)", page.read_text("utf-8"))
    }
    assert linked == listed.keys()


def test_each_table_of_figures_has_its_command_its_commit_and_its_date() -> None:
    page = FIGURES.read_text("utf-8")
    parts = re.findall(r'^    "(\w+)": \(', (ROOT / "bench" / "__main__.py").read_text("utf-8"), re.MULTILINE)
    measured = MEASURED.findall(page)
    assert len(measured) == len(set(measured)) == len(re.findall(r"^(?:\|-|```text$)", page, re.MULTILINE))
    assert set(measured) <= set(parts)


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_figures_that_were_measured_stand_in_one_page(page: Path) -> None:
    tables = (
        [] if page == FIGURES else re.findall(r"^\|.*\bmeasured \|", page.read_text("utf-8"), re.MULTILINE)
    )
    assert tables == []


def test_the_pages_are_short() -> None:
    words = {page.name: words_of(page) for page in (ROOT / "docs").glob("*.md")}
    assert sum(words.values()) <= MOST_WORDS
    assert sum(count for name, count in words.items() if name not in NEW_PAGES) <= MOST_WORDS_OF_THE_FIRST


def words_of(page: Path) -> int:
    """Count the words of a page apart from examples, names of tests, and tables that are made from code."""
    text = re.sub(r"`tests/\S+`", "", FENCED.sub("", page.read_text("utf-8")))
    if page.name == "kinds.md":
        text = text.split("\n## ")[0]
    if page.name == "configuration.md":
        text = re.sub(r"^\| `.*\n", "", text, flags=re.MULTILINE)
    if page.name == "architecture.md":
        text = text.partition("\n| kind | file | rule |")[0]
    return sum(1 for word in text.split() if re.search(r"\w", word))
