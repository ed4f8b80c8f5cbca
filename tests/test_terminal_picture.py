"""The picture of the README: as its script makes it, and of what the demo prints today."""

import re
import runpy
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "demo.svg"
MAKER = runpy.run_path(str(ROOT / "packaging" / "terminal_picture.py"))
BOUND_S = 180
SVG = "{http://www.w3.org/2000/svg}"

# What differs from one run to the next, and from one machine to another.
MASKS = (
    (re.compile(r"[0-9a-z]{26}"), "ID"),
    (re.compile(r"(<<<|>>>)[0-9a-f]{16}"), r"\1MARK"),
    (re.compile(r"\d+ days?, "), ""),
    (re.compile(r"\d[\d.:]*"), "N"),
    (re.compile(r"(?<=disk).*\)"), " MOUNT"),
    (re.compile(r"(?<=worst).*"), " FINDING"),
    (re.compile(r"(?<=unavailable).*"), " SOURCES"),
    (re.compile(r"(?<=\S) +"), " "),
    (re.compile(r"^ +"), " "),
)


def lines_of(svg: str) -> list[str]:
    return [text.text or "" for text in ET.fromstring(svg).iter(f"{SVG}text")]  # noqa: S314 - our own file


def forms(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        form = line
        for mask, stands in MASKS:
            form = mask.sub(stands, form)
        yield form


def split(lines: Iterable[str]) -> tuple[list[str], set[str]]:
    """Return the forms of the lines that every machine prints, and those of its disks."""
    every = [form for form in forms(lines) if " is in use on " not in form]
    disks = {form for form in every if form.startswith(" disk ")}
    return [form for form in every if form not in disks], disks


def test_the_picture_is_what_its_script_makes_of_its_lines() -> None:
    svg = PICTURE.read_text("utf-8")
    assert MAKER["picture"](lines_of(svg)) == svg


@pytest.mark.long
@pytest.mark.timeout(200)
def test_the_picture_shows_what_the_demo_prints() -> None:
    command, *printed = lines_of(PICTURE.read_text("utf-8"))
    words = command.split()
    assert words[:3] == ["$", "relay", "demo"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", *words[1:]],
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (lines, disks), (lines_today, disks_today) = split(printed), split(done.stdout.splitlines())
    assert lines == lines_today
    assert disks >= disks_today


def test_a_reader_without_the_picture_is_told_what_it_shows_and_nothing_is_fetched_for_it() -> None:
    root = ET.fromstring(PICTURE.read_text("utf-8"))  # noqa: S314 - our own file
    named = (root.get("aria-labelledby") or "").split()
    assert root.get("role") == "img"
    assert [element.get("id") for element in root[:2]] == named
    assert all(element.text for element in root[:2])
    text = PICTURE.read_text("utf-8").replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert re.findall(r"href|url\(|@import|<image|<script", text) == []


def test_text_of_the_demo_stays_text() -> None:
    svg = MAKER["picture"](["$ relay demo", "<script>&amp;</script>"])
    assert lines_of(svg) == ["$ relay demo", "<script>&amp;</script>"]


def test_a_line_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="101 characters"):
        MAKER["picture"](["x" * 101])
