"""What the documents name exists: modules, other documents, and the sections that links lead to."""

import json
import re
import runpy
import subprocess
import tomllib
from pathlib import Path

import pytest
from jsonschema_rs import Draft202012Validator

from schemas.kinds import DOCUMENTS as OF_A_KIND
from schemas.kinds import ROW, SHIPPED, shipped_names
from tests.fakes.guide import ROOT, named_tests, product_trees

DOCUMENTS = sorted([*ROOT.glob("[A-Z]*.md"), *(ROOT / "docs").rglob("*.md")])

PATH = re.compile(r"(?<![\w./-])(?:relay|kubelet|schemas|tests)/[\w@./*-]*[\w/*]")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
NEW_FILE = re.compile(r"<!-- file: ([^,\s]+) -->")
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
DECISION = re.compile(r"\A# ([0-9]{4}) (.+)\n")
PICTURED = {"relay": slice(0, 48), "kubelet": slice(48, None)}
"""Where in a line of the architecture's picture each program is."""
MOST_LINES_OF_THE_README = 120
INDEX_ROW = re.compile(r"^\| \[([0-9]{4})\]\(([^)]+)\) \| (.+) \|$", re.MULTILINE)

documents = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=[str(document.relative_to(ROOT)) for document in DOCUMENTS]
)


def named_paths(text: str) -> set[str]:
    return {found.rstrip(".") for found in PATH.findall(text)}


def missing_paths(text: str) -> set[str]:
    """Return the paths that ``text`` names and the tree does not have; ``*`` matches any name."""
    created = set(NEW_FILE.findall(text))
    return {path for path in named_paths(text) - created if not any(ROOT.glob(path.rstrip("/")))}


def missing_links(text: str, directory: Path) -> set[str]:
    """Return the relative links of ``text``, a document in ``directory``, that lead to no file or section."""
    missing = set()
    for link in LINK.findall(text):
        path, _, section = link.partition("#")
        if "://" in link:
            continue
        target = directory / path
        if not target.exists() or (section and section not in sections_of(target.read_text("utf-8"))):
            missing.add(link)
    return missing


def sections_of(text: str) -> set[str]:
    """Return the anchors of the headings of ``text``, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


PAGES = [each for each in DOCUMENTS if each == ROOT / "README.md" or each.parent == ROOT / "docs"]
UNPUBLISHED = re.compile(r"\b(?:RFC-000\d|SPEC-\d{4})\b")
BY_NAME = re.compile(r"(?:pip|pipx|uvx?) [^`\n]*(?<!/)\bedge-kubelet\b(?!/)")


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_a_page_takes_our_package_by_path_and_cites_nothing_that_its_reader_cannot_get(page: Path) -> None:
    text = page.read_text("utf-8")
    assert BY_NAME.findall(text) == []
    assert UNPUBLISHED.findall(text) == []


def test_no_program_tells_its_user_to_take_our_package_by_name() -> None:
    texts = {path: (ROOT / path).read_text("utf-8") for path in product_trees()}
    assert {str(path): BY_NAME.findall(text) for path, text in texts.items() if BY_NAME.search(text)} == {}


def test_our_package_by_name_is_found() -> None:
    assert BY_NAME.findall("pip install 'edge-kubelet[client]'")
    assert not BY_NAME.findall('pip install "${EDGE}[client]"')


def test_the_readme_is_short_and_names_the_commands_of_a_clone_which_ci_runs_by_their_names() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    assert len(readme.splitlines()) <= MOST_LINES_OF_THE_README
    assert {"`make demo`", "`make test`"} <= set(re.findall(r"`make [a-z]+`", readme))
    assert re.search(r"^make test ", (ROOT / ".ci" / "run").read_text("utf-8"), re.MULTILINE)


@documents
def test_every_path_that_a_document_names_exists(document: Path) -> None:
    assert missing_paths(document.read_text("utf-8")) == set()


@documents
def test_every_test_that_a_document_names_exists(document: Path) -> None:
    for path, name in TEST.findall(document.read_text("utf-8")):
        assert name in named_tests(path), f"{path}::{name}"


@documents
def test_every_relative_link_leads_to_a_file(document: Path) -> None:
    assert missing_links(document.read_text("utf-8"), document.parent) == set()


def test_a_path_or_a_link_that_leads_nowhere_is_found() -> None:
    text = "`relay/nowhere.py`, relay/*/__init__.py, [here](nowhere.md), [there](docs/audit.md#nothing)"
    assert missing_paths(text) == {"relay/nowhere.py"}
    assert missing_links(text, ROOT) == {"nowhere.md", "docs/audit.md#nothing"}


def test_the_page_of_kinds_is_that_of_the_directory_of_kinds() -> None:
    maker = runpy.run_path(str(ROOT / "packaging" / "kinds_page.py"))
    assert (ROOT / "docs" / "kinds.md").read_text("utf-8") == maker["page"](), "make kinds"


def test_each_kind_has_its_question_and_an_answer_that_was_recorded_is_one() -> None:
    asked = json.loads((ROOT / "packaging" / "asked.json").read_bytes())["kinds"]
    assert sorted(asked) == sorted(shipped_names())
    for name, record in asked.items():
        if "answer" in record:
            row = json.loads((SHIPPED / name / ROW).read_bytes())
            ref = row["verbs"][record["verb"]]["output"]
            document = json.loads((SHIPPED / name / OF_A_KIND / f"{ref}.json").read_bytes())
            assert Draft202012Validator(document).is_valid(record["answer"])


COMPATIBILITY = (ROOT / "docs" / "compatibility.md").read_text("utf-8")


def test_the_page_of_what_was_tried_has_each_row_of_the_release_check_and_no_other() -> None:
    script = (ROOT / ".ci" / "release-check").read_text("utf-8")
    rows = re.findall(r"^([\w.-]+) {2,}\w", script.split("<<'END'\n")[1].split("\nEND\n")[0], re.MULTILINE)
    named = re.findall(r"^\|.*\| (?:`\.ci/pythons`, )?`([\w.-]+)` \| (\S.*) \|$", COMPATIBILITY, re.MULTILINE)
    assert sorted(name for name, _ in named) == sorted(rows)
    for _, when in named:
        assert re.match(r"(\d{4}-\d\d-\d\d|not tested)(, |$)", when)


@pytest.mark.integration
def test_the_release_check_tries_the_release_of_this_version_beside_others(tmp_path: Path) -> None:
    (found,) = re.findall(r"(?m)^release\(\) .*$", (ROOT / ".ci" / "release-check").read_text("utf-8"))
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    (tmp_path / "pyproject.toml").write_text(project, "utf-8")
    of_this = tmp_path / "dist" / f"edge-kubelet-{tomllib.loads(project)['project']['version']}"
    for release in (of_this, tmp_path / "dist" / "edge-kubelet-0.1.0"):
        release.mkdir(parents=True)
    told = subprocess.check_output(["/bin/bash", "-c", f"{found}\nrelease"], cwd=tmp_path, text=True)
    assert told == f"{of_this}\n"


def test_the_versions_that_were_tried_are_those_that_ci_installs() -> None:
    packages = json.loads((ROOT / "tests" / "conformance" / "package.json").read_bytes())["dependencies"]
    locks = [ROOT / "requirements.lock", *(ROOT / "tests" / "conformance").glob("*.lock")]
    locked = {
        version for lock in locks for version in re.findall(r"(?m)^[\w.-]+==(\S+)", lock.read_text("utf-8"))
    }
    clients = COMPATIBILITY.split("## Clients")[1].split("\n## ")[0]
    versions = re.findall(r"^\| [^|]+ \| ([\d.a-z, -]+) \|.*\| CI \|$", clients, re.MULTILINE)
    tried = {version for cell in versions if cell != "-" for version in cell.split(", ")}
    assert len(tried) > 5
    assert tried <= locked | set(packages.values())


def test_every_decision_is_in_the_index_by_its_title() -> None:
    directory = ROOT / "docs" / "decisions"
    decisions = set()
    for file in directory.glob("[0-9]*.md"):
        heading = DECISION.match(file.read_text("utf-8"))
        assert heading, file.name
        assert file.name.startswith(heading[1])
        decisions.add((heading[1], file.name))
    rows = INDEX_ROW.findall((directory / "README.md").read_text("utf-8"))
    assert [(number, file) for number, file, _ in rows] == sorted(decisions)


def test_the_architecture_names_every_package_and_every_module_of_the_way_of_one_call() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    packages = {
        f"{package}/{entry.stem}"
        for package in ("relay", "kubelet")
        for entry in (ROOT / package).iterdir()
        if not entry.name.startswith("_") and (entry.suffix == ".py" or (entry / "__init__.py").exists())
    }
    for program in PICTURED:
        pictured = {f"{program}/{name}" for layer in pictured_layers(text, program) for name in layer}
        assert pictured == {package for package in packages if package.startswith(program)}
    rows = set(re.findall(r"^\| `((?:relay|kubelet)/\w+)/` \|", text, re.MULTILINE))
    assert rows >= {package for package in packages if (ROOT / package).is_dir()}
    way = text.split("## The way of one call")[1].split("\n## ")[0]
    named = PATH.findall(way)
    assert sorted(named) == sorted(set(named)), "each module once"
    drawn = re.findall(r"\w+", way.split("```")[1])
    assert sorted(drawn) == sorted(set(drawn)), "each package once"


def pictured_layers(text: str, program: str) -> list[set[str]]:
    """Return the layers of a program in the picture, from the top; the lowest takes several lines."""
    layers: list[set[str]] = []
    is_lowest = False
    for line in text.split("```")[1].splitlines()[3:]:
        part = line[PICTURED[program]]
        if "└" in part:
            break
        names = set(re.findall(r"[a-z_]+", part))
        if is_lowest:
            layers[-1] |= names
        else:
            layers.append(names)
        is_lowest = is_lowest or "├" in part
    return layers


@pytest.mark.parametrize("program", PICTURED)
def test_the_picture_has_the_layers_that_the_linter_enforces(program: str) -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    (contract,) = (
        contract
        for contract in settings["tool"]["importlinter"]["contracts"]
        if contract["type"] == "layers" and contract["containers"] == [program]
    )
    layers = [set(re.findall(r"\w+", layer)) for layer in contract["layers"]]
    assert pictured_layers(text, program) == layers
