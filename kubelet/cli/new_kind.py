"""Writes the package of a new kind, which is complete: its own test passes, and a node runs it.

Must not overwrite a file.
"""

import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from string import Template
from types import MappingProxyType

from schemas.error_roots import CommandLineError
from schemas.kinds import KindRegistry, kind_name, shipped_names

_TEMPLATES = Path(__file__).with_name("kind_template")
_FILES: Mapping[str, str] = MappingProxyType(
    {
        "pyproject.toml": "pyproject.toml",
        "%%{package}/__init__.py": "init.py",
        "%%{package}/kind.json": "%%{source}/kind.json",
        "%%{package}/documents/%%{kind}.get.input@1.0.0.json": "%%{source}/input.json",
        "%%{package}/documents/%%{kind}.get.output@1.0.0.json": "%%{source}/output.json",
        "%%{package}/handler.py": "%%{source}/handler.py",
        "tests/__init__.py": "init.py",
        "tests/test_handler.py": "%%{source}/test_handler.py",
    }
)
"""The files of a package, and the templates that they are made of."""


class KindSource(StrEnum):
    """Where the kind has what it answers from."""

    SENSOR = "sensor"
    JOURNAL = "journal"
    COMMAND = "command"


_MAX_SHORT = 8
_MAX_CAP_ID = 18
_RESERVED = "system."


class _Text(Template):
    delimiter = "%%"  # JSON Schema has members that begin with a dollar sign


def write_package(name: str, parent: Path, source: KindSource = KindSource.SENSOR) -> Path:
    """Write the package of the kind ``name`` into a new directory of ``parent``, and return that.

    Its handler reads what ``source`` says.

    Raises:
        CommandLineError: no kind of an operator's own can have the name.
        OSError: the directory exists, or cannot be written.
    """
    words = [word for word in re.split(r"[._]", kind_name(name)) if word]
    short = "".join(words)[:_MAX_SHORT]
    if name.startswith(_RESERVED):
        raise CommandLineError(f"{name} is a name of RFC-0001's own kinds: begin with your organisation")
    if name in shipped_names():
        raise CommandLineError(f"{name} ships with this program: choose another name")
    if (other := KindRegistry().by_short(short)) is not None:
        raise CommandLineError(f"{name} would be {short} for short, as {other.name} is: choose another name")
    last = name.rpartition(".")[2]
    values = {
        "kind": name,
        "source": source.value,
        "title": " ".join(word for word in last.split("_") if word).capitalize(),
        "short": short,
        "package": name.replace(".", "_"),
        "distribution": "-".join(words),
        "handler": "".join(word.capitalize() for word in last.split("_")) + "Handler",
        "cap_id": last[:_MAX_CAP_ID],
    }
    root = parent / values["distribution"]
    root.mkdir()
    for path, template in _FILES.items():
        text = (_TEMPLATES / f"{_Text(template).substitute(values)}.template").read_text("utf-8")
        file = root / _Text(path).substitute(values)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_Text(text).substitute(values), "utf-8")
    return root
