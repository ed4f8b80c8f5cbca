"""The servers in a client's TOML configuration: one table is put in or taken out, all other lines stay.

The lines are edited and not the parsed document, because comments and order belong to the user; what results
is parsed and compared with what was wanted. Must not touch a file.
"""

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from relay.client.connect.errors import UnreadableConfigError

_HEADER = re.compile(r"^\s*\[")


def with_server(text: str, section: str, name: str, entry: Mapping[str, Any]) -> str:
    """Return the configuration ``text`` with ``entry``, of strings and lists of strings, as a server's table.

    Raises:
        UnreadableConfigError: it is not TOML, or has the server in another form than a table.
    """
    expected = _read(text)
    expected[section] = {**expected.get(section, {}), name: dict(entry)}
    # A string of JSON without what JSON escapes otherwise is one of TOML, and so is a list of them.
    lines = [f"[{section}.{name}]", *(f"{key} = {json.dumps(value)}" for key, value in entry.items())]
    rest = _without(text, section, name)
    gap = "\n" if rest.strip() else ""
    return _checked(f"{rest.rstrip()}\n{gap}".lstrip("\n") + "\n".join(lines) + "\n", expected)


def without_server(text: str, section: str, name: str) -> str:
    """Return the configuration ``text`` without the table of the server ``name``.

    Raises:
        UnreadableConfigError: as ``with_server``.
    """
    expected = _read(text)
    if name not in expected.get(section, {}):
        return text
    del expected[section][name]
    if not expected[section]:
        del expected[section]
    return _checked(_without(text, section, name), expected)


def _read(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError):
        raise UnreadableConfigError("is not TOML") from None


def _without(text: str, section: str, name: str) -> str:
    """Return ``text`` without the lines of the server's table and of the tables below it."""
    own = re.compile(rf"^\s*\[\s*{re.escape(section)}\s*\.\s*\"?{re.escape(name)}\"?\s*[.\]]")
    kept, inside = [], False
    for line in text.splitlines(keepends=True):
        if _HEADER.match(line):
            inside = own.match(line) is not None
        if not inside:
            kept.append(line)
    return "".join(kept)


def _checked(text: str, expected: Mapping[str, Any]) -> str:
    # An empty table that remains of the section is the same as none.
    found = {key: value for key, value in _read(text).items() if value or key in expected}
    if found != dict(expected):
        raise UnreadableConfigError("has its servers in a form that cannot be changed line by line")
    return text
