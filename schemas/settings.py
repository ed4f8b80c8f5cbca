"""The settings of a program: one table, from which its keys, variables, flags and help texts follow.

    default < kept in the state directory < file < environment < flag

Each source gives texts, by the names of settings, and says where each of them stands. ``Settings`` is what
they make together; it is parsed as a whole, and every mistake in it is reported. The file is TOML, one key
for each setting, and is used only if no other user can change it. What the command line of ``run`` said is
kept in the state directory, for starts that are told less. Secrets are no settings: a setting can name the
file that holds one. Must not know a setting of either program.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from schemas.addresses import PLAIN_OPTION, collector_url
from schemas.error_roots import ConfigError, OperatorError, StateError
from schemas.files import check_directory, read_named, read_state, write_atomic
from schemas.lines import LogLevel
from schemas.strict_json import StrictJsonError, loads
from schemas.text import none_of, printable, quoted, unknown

ValueT = TypeVar("ValueT")
ChoiceT = TypeVar("ChoiceT", bound=Enum)

_TRUE_OR_FALSE: Mapping[str, bool] = MappingProxyType({"true": True, "false": False})
_WHOLE = re.compile("[0-9]{1,9}")


class Form(Enum):
    """How a value is written in a file: a string, a number, ``true`` and ``false``, or an array of strings.

    Elsewhere the elements of an array are separated by commas. A table stands in the file alone, and its text
    is JSON.
    """

    TEXT = "text"
    NUMBER = "number"
    FLAG = "flag"
    LIST = "list"
    TABLE = "table"


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
        example: a value for the sample of a file, where there is no default.
    """

    name: str
    parse: Callable[[str], ValueT]
    doc: str
    metavar: str = "TEXT"
    default: str | None = None
    form: Form = Form.TEXT
    reloads: bool = False
    example: str = ""

    @property
    def flag(self) -> str:
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
        taken = {setting.name: new.given.get(setting.name) for setting in changed if setting.reloads}
        given = {name: each for name, each in (self.given | taken).items() if each is not None}
        return Reloaded(
            Settings(self.table, [given]),
            applied={name: "not set" if each is None else each.text for name, each in taken.items()},
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
        raise OperatorError(f"{quoted(text)} is neither true nor false")
    return _TRUE_OR_FALSE[text]


def parse_path(text: str) -> Path:
    """Return the path of a file or directory, which may be given relative to the working directory."""
    if not text or "\0" in text:
        raise OperatorError(f"{quoted(text)} is not a path")
    return Path(text).absolute()


def list_of(parse: Callable[[str], ValueT], most: int | None = None) -> Callable[[str], tuple[ValueT, ...]]:
    """Return what parses ``most`` elements, each with ``parse``, separated by commas; there may be none."""

    def parse_list(text: str) -> tuple[ValueT, ...]:
        elements = [each.strip() for each in text.split(",")] if text.strip() else []
        values = tuple(parse(each) for each in elements)
        if most is not None and len(values) > most:
            raise OperatorError(f"names {len(values)}, and may name {most}")
        # Only what could be parsed is shown: anything else may hold a password.
        for element, count in Counter(elements).items():
            if count > 1:
                raise OperatorError(f"names {quoted(element)} twice")
        return values

    return parse_list


def whole_number(minimum: int, maximum: int) -> Callable[[str], int]:
    """Return what parses a whole number from ``minimum`` to ``maximum``."""

    def parse(text: str) -> int:
        if _WHOLE.fullmatch(text) and minimum <= int(text) <= maximum:
            return int(text)
        raise OperatorError(f"{quoted(text)} is not a whole number from {minimum} to {maximum}")

    return parse


def one_of(choices: type[ChoiceT]) -> Callable[[str], ChoiceT]:
    """Return what parses a value of an enumeration of words."""
    words = {str(choice.value): choice for choice in choices}

    def parse(text: str) -> ChoiceT:
        if text not in words:
            raise OperatorError(none_of(text, words))
        return words[text]

    return parse


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
    Form.TABLE: ((dict,), "a table"),
}


@dataclass(frozen=True, slots=True)
class Program:
    """A program that has settings. Its variables begin with its name: ``RELAY_LISTEN``."""

    name: str
    table: Table

    @property
    def options(self) -> Table:
        """The settings that are options and variables too."""
        return tuple(setting for setting in self.table if setting.form is not Form.TABLE)

    @property
    def prefix(self) -> str:
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
    if file is None and program.prefix + _FILE not in environment:
        unknown_keys = [*_of_others(program.usual_file.parent), *unknown_keys]
    in_environment, unknown_variables = _from_environment(program, environment)
    given = (in_file, in_environment, from_flags(program.table, flags))
    return Sources(program.table, flags, file, path, given, (*unknown_keys, *unknown_variables))


def _of_others(directory: Path) -> Iterator[str]:
    """Yield what is wrong with the directory of the usual file, which others could take away."""
    try:
        check_directory(directory)
    except FileNotFoundError:
        return
    except OSError as error:
        yield f"{directory}: {error.strerror}" if error.strerror else str(error)


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
    known = {setting.variable(program.prefix): setting for setting in program.options}
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
            table = next((f"{key}.{member}" for member in value), "") if isinstance(value, dict) else ""
            found_out = (
                f'write ["{table}"], with quotes' if table in known else unknown("setting", key, known)
            )
            problems.append(f"{place}: {found_out}")
        elif type(value) not in _FORMS[setting.form][0] or not _is_flat(value):
            problems.append(f"{place}: {key} is {_FORMS[setting.form][1]}")
        else:
            found[key] = Given(text_of(value), place)
    return found, problems


def _is_flat(value: Any) -> bool:
    """Return whether ``value``, if it is an array, has elements that can be separated by commas."""
    return not isinstance(value, list) or all(isinstance(each, str) and "," not in each for each in value)


def text_of(value: object) -> str:
    """Return the text that ``Setting.parse`` takes: of a list its elements, of a table JSON."""
    if isinstance(value, list):
        return ",".join(value)
    if isinstance(value, dict):
        return json.dumps(value, default=lambda _: None)  # a date of TOML, which no table has
    return str(value).lower() if isinstance(value, bool) else str(value)


def _line_of(key: str, text: str) -> str:
    """Return the line of a key or a table, which the parser does not tell; nothing if it is not found."""
    form = re.compile(rf"""\s*\[*\s*["']?{re.escape(key)}["']?\s*[\]=.]""")
    for number, line in enumerate(text.splitlines(), 1):
        if form.match(line):
            return f", line {number}"
    return ""


RUN_OPTIONS_FILE = "run.json"
"""Of the state directory: what earlier starts were told."""
_CONFIG = "config"
"""The option that names the file of the settings; it is none of them."""


class RunOptionsError(StateError):
    """The file is damaged; the text names it."""


@dataclass(frozen=True, slots=True)
class Alternatives:
    """Settings that belong together: where one of ``choices`` is named, none of ``members`` is kept."""

    choices: frozenset[str]
    members: frozenset[str]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What earlier starts were told.

    Attributes:
        before: as the file holds it, by the names of options.
        texts: the same, without what the operator names an alternative of.
    """

    path: Path
    before: Mapping[str, str]
    texts: Mapping[str, str]

    def source(self) -> Source:
        """Return the settings, which count less than all that the operator gives."""
        return {
            name: Given(text, f"kept in {self.path}") for name, text in self.texts.items() if name != _CONFIG
        }

    def other_file(self, sources: Sources) -> Path | None:
        """Return the file that an earlier start was told, if ``sources`` are of another and none is named."""
        told, read = self.texts.get(_CONFIG), sources.file
        is_read = read is not None and str(read.absolute()) == told
        return None if told is None or sources.named_file is not None or is_read else Path(told)

    def check_file(self, sources: Sources) -> None:
        """See that a start reads the file that an earlier one was told, unless it is told another.

        Raises:
            ConfigError: it does not.
        """
        if (told := self.other_file(sources)) is not None:
            reads = (
                f"an earlier start was told --config {told}, and this one reads {sources.file or 'no file'}"
            )
            raise ConfigError([f"{reads}: give --config"])

    def keep(self, flags: AbstractSet[str], settings: Settings, named_file: Path | None) -> Sequence[str]:
        """Keep what the options ``flags`` say, and return what that replaces: for each option, what it was.

        Raises:
            OSError: it cannot be written.
        """
        whole = settings.serialized()  # a path does not depend on where the next start is typed
        told = dict(self.texts) | {name: whole[name]["text"] for name in sorted(flags)}
        if named_file is not None:
            told[_CONFIG] = str(named_file.absolute())
        if told != self.before:
            write_atomic(self.path, json.dumps(told, indent=2) + "\n")
        gone = (name for name, text in self.before.items() if told.get(name) != text)
        return [f"--{name.replace('_', '-')} was {self.before[name]}" for name in gone]


def read_run_options(
    state_dir: Path,
    names: AbstractSet[str],
    named: AbstractSet[str] = frozenset(),
    alternatives: Sequence[Alternatives] = (),
) -> RunOptions:
    """Return what is kept in ``state_dir`` of the settings ``names``; the operator names ``named`` now.

    Raises:
        RunOptionsError: the file is damaged.
        OSError: it cannot be read, or others can write it.
    """
    path = state_dir / RUN_OPTIONS_FILE
    before = _read(path, names | {_CONFIG})
    gone = frozenset[str]().union(*(each.members for each in alternatives if named & each.choices))
    return RunOptions(path, before, {name: text for name, text in before.items() if name not in gone})


def keep_run_options(state_dir: Path, texts: Mapping[str, str]) -> None:
    """Keep ``texts`` for starts, by the names of options, where nothing is kept yet.

    Raises:
        OSError: it cannot be written.
    """
    path = state_dir / RUN_OPTIONS_FILE
    if not path.exists():
        write_atomic(path, json.dumps(dict(texts), indent=2) + "\n")


def kept_run_options(state_dir: Path) -> Mapping[str, str]:
    """Return what is kept for starts, by the names of options.

    Raises:
        RunOptionsError: the file is damaged.
        OSError: it cannot be read, or others can write it.
    """
    return _read(state_dir / RUN_OPTIONS_FILE)


def forget_run_options(state_dir: Path, names: AbstractSet[str]) -> None:
    """Keep no longer what starts were told of ``names``: something newer counts.

    Raises:
        OSError: it cannot be written.
    """
    path = state_dir / RUN_OPTIONS_FILE
    try:
        before = _read(path)
    except RunOptionsError:
        return  # the next start names it
    if before.keys() & names:
        left = {name: text for name, text in before.items() if name not in names}
        write_atomic(path, json.dumps(left, indent=2) + "\n")


def _read(path: Path, names: AbstractSet[str] | None = None) -> dict[str, str]:
    try:
        document = loads(read_state(path, _MAX_FILE_BYTES), max_bytes=_MAX_FILE_BYTES)
    except FileNotFoundError:
        return {}
    except StrictJsonError:
        raise _damaged(path) from None
    if not isinstance(document, dict) or not all(isinstance(text, str) for text in document.values()):
        raise _damaged(path)
    if names is not None and not document.keys() <= names:
        raise _damaged(path)
    return document


def _damaged(path: Path) -> RunOptionsError:
    return RunOptionsError(f"{path} is damaged: remove it, and name what it held at the next start")


OTLP = Setting(
    "otlp",
    collector_url,
    "Send the spans of traced calls to this collector, by OTLP over HTTP. Needs the extra `otel`.",
    "URL",
    example="http://127.0.0.1:4318",
)
PLAIN = Setting(
    PLAIN_OPTION.removeprefix("--").replace("-", "_"),
    parse_flag,
    "Allow connections without TLS: others on the network can read and write.",
    default="false",
    form=Form.FLAG,
)


def log_level_setting(text: str) -> Setting[LogLevel]:
    """Return the setting of the level of the log, which ``text`` explains."""
    return Setting(
        "log_level", one_of(LogLevel), text, "info|warning|error", LogLevel.INFO.value, reloads=True
    )
