"""Where settings stand: the operator's file, the environment, and the flags of a command.

The file is TOML, one key for each setting, and is used only if no other user can change it. Secrets are no
settings: a setting can name the file that holds one. Must not decide what a value may be.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemas.error_roots import ConfigError
from schemas.files import read_named
from schemas.settings import Form, Given, Setting, Settings, Source, Table, ValueT
from schemas.text import printable
from schemas.unknown_names import unknown

CONFIG_DIRECTORY = Path("/etc/edge-kubelet")

_MAX_FILE_BYTES = 65_536
_FILE = "CONFIG"
"""The variable, after the program's prefix, that names the file. Empty: there is none."""
_FORMS: Mapping[Form, tuple[tuple[type, ...], str]] = {
    Form.TEXT: ((str,), 'text in quotes: "…"'),
    Form.NUMBER: ((int,), "a whole number"),
    Form.FLAG: ((bool,), "true or false"),
    # One text is a list too: a setting that becomes a list must not make files of an older version wrong.
    Form.LIST: ((list, str), 'an array of texts: ["…", "…"]'),
}


@dataclass(frozen=True, slots=True)
class Program:
    """A program that has settings. Its variables begin with its name: ``RELAY_LISTEN``."""

    name: str
    table: Table

    @property
    def prefix(self) -> str:
        """How its variables begin."""
        return f"{self.name.upper()}_"

    @property
    def usual_file(self) -> Path:
        """The file that is read, if it is there, unless another is named."""
        return CONFIG_DIRECTORY / f"{self.name}.toml"


@dataclass(frozen=True, slots=True)
class Sources:
    """What the operator gives to one program, the file first and the flags last, and what is wrong with it.

    Attributes:
        flags, named_file: what the command line gave, by which the sources can be read again.
        file: the file that was read; None if there is none.
    """

    table: Table
    flags: Mapping[str, str]
    named_file: Path | None
    file: Path | None
    by_precedence: tuple[Source, ...]
    problems: tuple[str, ...]

    def settings(self, *below: Source) -> Settings:
        """Return what they make together, with the sources ``below`` them.

        Raises:
            ConfigError: something is wrong with it.
        """
        return Settings(self.table, (*below, *self.by_precedence), self.problems)

    def value(self, setting: Setting[ValueT]) -> ValueT | None:
        """Return the value of one setting, for a command that needs no other; None if none of them gives it.

        Raises:
            ConfigError: it cannot be parsed; or the file may give it, and cannot be used.
        """
        in_file, *above = (setting.name in source for source in self.by_precedence)
        if not any(above) and self.problems:
            raise ConfigError(self.problems)
        return Settings((setting,), self.by_precedence).get(setting) if in_file or any(above) else None


def read_sources(
    program: Program, flags: Mapping[str, str], file: Path | None, environment: Mapping[str, str]
) -> Sources:
    """Return what ``flags``, by the names of settings, the environment and the file give.

    ``file`` is the one that was named on the command line, if one was.
    """
    path = file_of(program, file, environment)
    in_file, unknown_keys = ({}, []) if path is None else _from_file(program, path)
    in_environment, unknown_variables = _from_environment(program, environment)
    given = (in_file, in_environment, from_flags(program.table, flags))
    return Sources(program.table, flags, file, path, given, (*unknown_keys, *unknown_variables))


def file_of(program: Program, named: Path | None, environment: Mapping[str, str]) -> Path | None:
    """Return the file that is read: the one named, by a flag or by a variable, or else the usual one."""
    if named is not None:
        return named
    if (text := environment.get(program.prefix + _FILE)) is not None:
        return Path(text) if text else None
    return program.usual_file if program.usual_file.exists() else None


def from_flags(table: Table, flags: Mapping[str, str]) -> Source:
    """Return what ``flags``, by the names of settings, give."""
    return {
        setting.name: Given(flags[setting.name], setting.flag) for setting in table if setting.name in flags
    }


def _from_environment(program: Program, environment: Mapping[str, str]) -> tuple[Source, list[str]]:
    known = {setting.variable(program.prefix): setting for setting in program.table}
    found = {
        setting.name: Given(environment[variable], variable)
        for variable, setting in known.items()
        if variable in environment
    }
    ours = {name for name in environment if name.startswith(program.prefix)}
    strange = sorted(ours - known.keys() - {program.prefix + _FILE})
    return found, [f"the environment: {unknown('variable', name, known)}" for name in strange]


def _from_file(program: Program, path: Path) -> tuple[Source, list[str]]:
    import tomllib  # noqa: PLC0415 - a node without a file does without it

    try:
        text = read_named(path, _MAX_FILE_BYTES).decode("utf-8")
        document = tomllib.loads(text)
    except OSError as error:
        # What refuses a file of another user says why in its text, and has no number.
        return {}, [f"{path}: {error.strerror}" if error.strerror else str(error)]
    except UnicodeDecodeError:
        return {}, [f"{path} is not text in UTF-8"]
    except (ValueError, RecursionError) as error:  # one of them: an integer of thousands of digits
        return {}, [f"{path} is not TOML: {printable(str(error))}"]
    known = {setting.name: setting for setting in program.table}
    found: dict[str, Given] = {}
    problems = []
    for key, value in document.items():
        place = f"{path}{_line_of(key, text)}"
        setting = known.get(key)
        if setting is None:
            problems.append(f"{place}: {unknown('setting', key, known)}")
        elif type(value) not in _FORMS[setting.form][0] or not _is_flat(value):
            problems.append(f"{place}: {key} is {_FORMS[setting.form][1]}")
        else:
            found[key] = Given(text_of(value), place)
    return found, problems


def _is_flat(value: Any) -> bool:
    """Return whether ``value``, if it is an array, has elements that can be separated by commas."""
    return not isinstance(value, list) or all(isinstance(each, str) and "," not in each for each in value)


def text_of(value: object) -> str:
    """Return the text that ``Setting.parse`` takes; a list is an array, or an option given several times."""
    if isinstance(value, list):
        return ",".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _line_of(key: str, text: str) -> str:
    """Return the line of a key or a table, which the parser does not tell; nothing if it is not found."""
    form = re.compile(rf"""\s*\[*\s*["']?{re.escape(key)}["']?\s*[\]=.]""")
    for number, line in enumerate(text.splitlines(), 1):
        if form.match(line):
            return f", line {number}"
    return ""
