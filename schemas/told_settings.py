"""What ``run`` was told on its command line: kept in the state directory, for starts that are told less.

Kept are the texts of options; what the file or the environment says stays there. Must not hold a secret, and
must not know a setting of either program.
"""

import json
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

from schemas.error_roots import ConfigError, StateError
from schemas.files import read_state, write_atomic
from schemas.settings import Given, Settings, Source
from schemas.strict_json import StrictJsonError, loads

_FILE = "run.json"
_MAX_BYTES = 65_536
_CONFIG = "config"
"""The option that names the file of the settings; it is none of them."""


class ToldSettingsError(StateError):
    """The file is damaged; the text names it."""


@dataclass(frozen=True, slots=True)
class Alternatives:
    """Settings that belong together: where one of ``choices`` is named, none of ``members`` is kept."""

    choices: frozenset[str]
    members: frozenset[str]


@dataclass(frozen=True, slots=True)
class ToldSettings:
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

    def check_file(self, named: Path | None, read: Path | None) -> None:
        """See that a start reads the file that an earlier one was told, unless it is told another.

        Raises:
            ConfigError: it does not.
        """
        told = self.texts.get(_CONFIG)
        if told is not None and named is None and (read is None or str(read.absolute()) != told):
            reads = f"an earlier start was told --config {told}, and this one reads {read or 'no file'}"
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


def read_told(
    state_dir: Path,
    names: AbstractSet[str],
    named: AbstractSet[str] = frozenset(),
    alternatives: Sequence[Alternatives] = (),
) -> ToldSettings:
    """Return what is kept in ``state_dir`` of the settings ``names``; the operator names ``named`` now.

    Raises:
        ToldSettingsError: the file is damaged.
        OSError: it cannot be read, or others can write it.
    """
    path = state_dir / _FILE
    before = _read(path, names | {_CONFIG})
    gone = frozenset[str]().union(*(each.members for each in alternatives if named & each.choices))
    return ToldSettings(path, before, {name: text for name, text in before.items() if name not in gone})


def forget_told(state_dir: Path, names: AbstractSet[str]) -> None:
    """Keep no longer what starts were told of ``names``: something newer counts.

    Raises:
        OSError: it cannot be written.
    """
    path = state_dir / _FILE
    try:
        before = _read(path)
    except ToldSettingsError:
        return  # the next start names it
    if before.keys() & names:
        left = {name: text for name, text in before.items() if name not in names}
        write_atomic(path, json.dumps(left, indent=2) + "\n")


def _read(path: Path, names: AbstractSet[str] | None = None) -> dict[str, str]:
    try:
        document = loads(read_state(path, _MAX_BYTES), max_bytes=_MAX_BYTES)
    except FileNotFoundError:
        return {}
    except StrictJsonError:
        raise _damaged(path) from None
    if not isinstance(document, dict) or not all(isinstance(text, str) for text in document.values()):
        raise _damaged(path)
    if names is not None and not document.keys() <= names:
        raise _damaged(path)
    return document


def _damaged(path: Path) -> ToldSettingsError:
    return ToldSettingsError(f"{path} is damaged: remove it, and name what it held at the next start")
