"""The settings of a program: one table, from which its keys, variables, flags and help texts follow.

    default < kept in the state directory < file < environment < flag

Each source gives texts, by the names of settings, and says where each of them stands. ``Settings`` is what
they make together; it is parsed as a whole, and every mistake in it is reported. Must not read a file or the
environment (``schemas.settings_sources``), and must not know a setting of either program.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from schemas.error_roots import ConfigError, OperatorError
from schemas.text import printable
from schemas.unknown_names import none_of

ValueT = TypeVar("ValueT")
ChoiceT = TypeVar("ChoiceT", bound=Enum)

_TRUE_OR_FALSE: Mapping[str, bool] = MappingProxyType({"true": True, "false": False})
_WHOLE = re.compile("[0-9]{1,9}")


class Form(Enum):
    """How a value is written in a file: a string, a number, ``true`` and ``false``, or an array of strings.

    Elsewhere the elements of an array are separated by commas.
    """

    TEXT = "text"
    NUMBER = "number"
    FLAG = "flag"
    LIST = "list"


@dataclass(frozen=True, slots=True)
class Setting(Generic[ValueT]):
    """One setting of a program.

    Attributes:
        name: its key in the file; the variable and the flag are made of it.
        parse: returns the value of a text; raises an OperatorError that says what is allowed.
        doc: one sentence for help, man page and documents.
        metavar: what stands for the value in help; "" for a flag.
        default: as it would be written; None if there is none.
        reloads: whether a running program applies a change at SIGHUP; else it needs a restart.
    """

    name: str
    parse: Callable[[str], ValueT]
    doc: str
    metavar: str = "TEXT"
    default: str | None = None
    form: Form = Form.TEXT
    reloads: bool = False

    @property
    def flag(self) -> str:
        """The option of the command line."""
        return "--" + self.name.replace("_", "-")

    def variable(self, prefix: str) -> str:
        """Return the environment variable of a program whose variables begin with ``prefix``."""
        return f"{prefix}{self.name.upper()}"


Table = tuple[Setting[Any], ...]


@dataclass(frozen=True, slots=True)
class Given:
    """The text of a value, and where it stands: a flag, a variable, or a line of a file."""

    text: str
    source: str


Source = Mapping[str, Given]
"""What one source gives, by the names of settings."""


class Settings:
    """The values of all settings of a table, and where each comes from.

    ``sources`` begin with the one that every other overrides. ``problems`` are those that the sources have
    found themselves.

    Raises:
        ConfigError: there are such problems, or a value cannot be parsed.
    """

    def __init__(self, table: Table, sources: Iterable[Source], problems: Iterable[str] = ()) -> None:
        self.table = table
        self.given: dict[str, Given] = {
            setting.name: Given(setting.default, "default")
            for setting in table
            if setting.default is not None
        }
        for source in sources:
            self.given.update(source)
        self._values: dict[str, Any] = {}
        found = list(problems)
        for setting in table:
            if (given := self.given.get(setting.name)) is None:
                continue
            try:
                self._values[setting.name] = setting.parse(given.text)
            except OperatorError as error:
                found.append(f"{given.source}: {setting.name} {error}")
        if found:
            raise ConfigError(found)

    def __getitem__(self, setting: Setting[ValueT]) -> ValueT:
        """Return the value of a setting that has a default."""
        value: ValueT = self._values[setting.name]
        return value

    def get(self, setting: Setting[ValueT]) -> ValueT | None:
        """Return the value of a setting; None if no source gives one."""
        return self._values.get(setting.name)

    def source(self, setting: Setting[Any]) -> str:
        """Return where the value of a setting comes from, for people."""
        given = self.given.get(setting.name)
        return "not set" if given is None else given.source

    def reloaded(self, new: "Settings") -> "Reloaded":
        """Return what a program that runs with these has after it has read ``new``."""
        changed = [setting for setting in self.table if self.get(setting) != new.get(setting)]
        taken = {setting.name: new.given[setting.name] for setting in changed if setting.reloads}
        return Reloaded(
            Settings(self.table, [self.given, taken]),
            applied={name: given.text for name, given in taken.items()},
            need_restart=[setting.name for setting in changed if not setting.reloads],
        )

    def serialized(self) -> dict[str, dict[str, str]]:
        """Return the values and where they come from, as JSON: enough to make the same again."""
        return {
            name: {"text": self._whole(name, given.text), "source": given.source}
            for name, given in self.given.items()
        }

    def _whole(self, name: str, text: str) -> str:
        """Return a text that means the same in another working directory."""
        value = self._values[name]
        return str(value) if isinstance(value, Path) else text


@dataclass(frozen=True, slots=True)
class Reloaded:
    """What a running program has after it has read its settings again.

    Attributes:
        settings: what it runs with now.
        applied: the texts of those that it applies, by their names.
        need_restart: the names of those that have changed, but need a restart.
    """

    settings: Settings
    applied: Mapping[str, str]
    need_restart: Sequence[str]


SerializedSettings = Mapping[str, Mapping[str, str]]
"""What ``Settings.serialized`` returns: by the names of settings, ``text`` and ``source``."""


def source_of(serialized: SerializedSettings) -> Source:
    """Return what ``Settings.serialized`` has returned, as one source.

    Raises:
        LookupError, TypeError, AttributeError: it is of another form.
    """
    return {name: Given(each["text"], each["source"]) for name, each in serialized.items()}


def settings_of(table: Table, serialized: SerializedSettings) -> Settings:
    """Return the settings that ``Settings.serialized`` was called on."""
    return Settings(table, [source_of(serialized)])


def parse_flag(text: str) -> bool:
    """Return the value of ``true`` or ``false``."""
    if text not in _TRUE_OR_FALSE:
        raise OperatorError(f"{printable(text)!r} is neither true nor false")
    return _TRUE_OR_FALSE[text]


def parse_path(text: str) -> Path:
    """Return the path of a file or directory, which may be given relative to the working directory."""
    if not text or "\0" in text:
        raise OperatorError(f"{printable(text)!r} is not a path")
    return Path(text).absolute()


def list_of(parse: Callable[[str], ValueT]) -> Callable[[str], tuple[ValueT, ...]]:
    """Return what parses elements, each with ``parse``, that are separated by commas; there may be none."""

    def parse_list(text: str) -> tuple[ValueT, ...]:
        elements = [each.strip() for each in text.split(",")] if text.strip() else []
        values = tuple(parse(each) for each in elements)
        # Only what could be parsed is shown: anything else may hold a password.
        for element, count in Counter(elements).items():
            if count > 1:
                raise OperatorError(f"names {printable(element)!r} twice")
        return values

    return parse_list


def whole_number(minimum: int, maximum: int) -> Callable[[str], int]:
    """Return what parses a whole number from ``minimum`` to ``maximum``."""

    def parse(text: str) -> int:
        if _WHOLE.fullmatch(text) and minimum <= int(text) <= maximum:
            return int(text)
        raise OperatorError(f"{printable(text)!r} is not a whole number from {minimum} to {maximum}")

    return parse


def one_of(choices: type[ChoiceT]) -> Callable[[str], ChoiceT]:
    """Return what parses a value of an enumeration of words."""
    words = {str(choice.value): choice for choice in choices}

    def parse(text: str) -> ChoiceT:
        if text not in words:
            raise OperatorError(none_of(text, words))
        return words[text]

    return parse
