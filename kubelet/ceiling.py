"""The ceiling of the board's owner: which units, names, directories or interfaces may be asked for, by kind.

    ["linux.journal"]
    units = ["nginx*", "!nginx-secrets*"]

A table of ``kubelet.toml`` for each kind, and of nothing else: no relay, token or approval widens it. A name
must match a pattern, and none that begins with ``!``. Where a list is not there, or has only such patterns,
every other name is allowed, but no directory. Names are compared after they were resolved: a unit by its
canonical one. What lists something leaves out what is outside, and counts it; what is named is refused, the
same whether it exists or not. The table of ``linux.health`` has its thresholds too. Must not know what a name
stands for.
"""

import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, NamedTuple

from kubelet.thresholds import DEFAULTS, THRESHOLDS, Threshold
from schemas.error_roots import OperatorError
from schemas.text import none_of, quoted

LISTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "linux.files": ("directories",),
        "linux.health": ("units", "mounts", "interfaces", "sensors", "disks"),
        "linux.journal": ("units",),
        "linux.network": ("interfaces",),
        "linux.packages": ("names",),
        "linux.processes": ("names",),
        "linux.sensors": ("sensors", "interfaces"),
        "linux.units": ("units",),
    }
)
"""The lists that the table of a kind may have."""
FLAGS: Mapping[str, tuple[str, ...]] = MappingProxyType({"linux.processes": ("arguments",)})
"""What is shown only where its owner says ``true``."""
NUMBERS: Mapping[str, Mapping[str, Threshold]] = MappingProxyType({"linux.health": THRESHOLDS})
"""The thresholds that the table of a kind may have."""

_DENIES = "!"
_CLOSED = frozenset({"directories"})
"""Lists that allow nothing by themselves."""
MAX_TABLE = 4096
"""Of a table as JSON, in characters: the daemon gets all of them on its command line."""


class OutsideCeilingError(Exception):
    """The owner does not allow what was named. ``rule`` is for the node's log alone."""

    def __init__(self, kind: str, rule: str) -> None:
        super().__init__(kind, rule)
        self.kind = kind
        self.rule = rule


class KindCeiling(NamedTuple):
    """One table: its lists of patterns by name, the flags that are ``true``, and thresholds by name."""

    lists: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    flags: frozenset[str] = frozenset()
    thresholds: Mapping[str, float] = DEFAULTS

    def restricts(self, what: str) -> bool:
        """Return whether some name of the list ``what`` may be outside."""
        return what in self.lists or what in _CLOSED

    def allowed(self, what: str) -> tuple[str, ...]:
        """Return the patterns of the list ``what`` of which a name must match one."""
        patterns = self.lists.get(what)
        named = tuple(each for each in patterns or () if not each.startswith(_DENIES))
        return ("*",) if not named and (patterns or patterns is None) and what not in _CLOSED else named

    def denied(self, what: str) -> tuple[str, ...]:
        """Return the patterns of which a name must match none, without what they begin with."""
        return tuple(each[1:] for each in self.lists.get(what, ()) if each.startswith(_DENIES))

    def denies(self, what: str, name: str) -> bool:
        """Return whether ``name`` matches a pattern that begins with ``!``."""
        return self._denying(what, name) is not None

    def rule_against(self, what: str, name: str) -> str | None:
        """Return the rule by which ``name`` is outside; None if it is allowed."""
        if (denying := self._denying(what, name)) is not None:
            return f"{what} {denying}"
        return None if any(fnmatchcase(name, each) for each in self.allowed(what)) else what

    def _denying(self, what: str, name: str) -> str | None:
        return next(
            (
                each
                for each in self.lists.get(what, ())
                if each.startswith(_DENIES) and fnmatchcase(name, each[1:])
            ),
            None,
        )


class Ceiling:
    """The tables that hold now, by kind. Each use reads them, so that a change holds for a next page too."""

    def __init__(self, tables: Mapping[str, KindCeiling] = MappingProxyType({})) -> None:
        self._tables = tables

    @classmethod
    def of_texts(cls, texts: Mapping[str, Mapping[str, str]]) -> "Ceiling":
        """Return the ceiling of settings as ``schemas.settings.Settings.serialized`` returns them."""
        return cls({kind: table_of(kind, texts[kind]["text"]) for kind in LISTS if kind in texts})

    def replace(self, tables: Mapping[str, KindCeiling]) -> None:
        """Let ``tables`` hold from now on."""
        self._tables = tables

    def of(self, kind: str) -> KindCeiling:
        return self._tables.get(kind, _NOTHING_SAID)

    def allows(self, kind: str, what: str, name: str) -> bool:
        """Return whether ``name``, which was resolved, may be asked for."""
        return self.of(kind).rule_against(what, name) is None

    def check(self, kind: str, what: str, name: str) -> None:
        """Check that ``name``, which was asked for and resolved, is allowed.

        Raises:
            OutsideCeilingError: it is not.
        """
        if (rule := self.of(kind).rule_against(what, name)) is not None:
            raise OutsideCeilingError(kind, rule)


_NOTHING_SAID = KindCeiling()


def table_of(kind: str, text: str) -> KindCeiling:
    """Return the table of ``kind`` whose members ``text`` has as JSON.

    Raises:
        OperatorError: it cannot be used; the text is what to do.
    """
    if len(text) > MAX_TABLE:
        raise OperatorError(f"is longer than {MAX_TABLE} characters: use patterns, such as nginx*")
    members: Any = json.loads(text)
    lists, flags, numbers = LISTS[kind], FLAGS.get(kind, ()), NUMBERS.get(kind, {})
    for name, value in members.items():
        if name not in (*lists, *flags, *numbers):
            raise OperatorError(none_of(name, (*lists, *flags, *numbers)))
        if name in numbers:
            _check_number(name, value, numbers[name])
        if name in flags and not isinstance(value, bool):
            raise OperatorError(f"{name} is true or false")
        if name in lists:
            _check(name, value)
    return KindCeiling(
        MappingProxyType({name: tuple(value) for name, value in members.items() if name in lists}),
        frozenset(name for name in flags if members.get(name)),
        MappingProxyType({**DEFAULTS, **{name: members[name] for name in numbers if name in members}}),
    )


def _check_number(name: str, value: Any, threshold: Threshold) -> None:
    least, most = threshold.least, threshold.most
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise OperatorError(
            f"{name} is a number from {least:g} to {most:g}; without it {threshold.default:g}"
        )


def _check(name: str, patterns: Any) -> None:
    if not isinstance(patterns, list) or not all(isinstance(each, str) for each in patterns):
        raise OperatorError(f'{name} is an array of patterns: ["nginx*", "!nginx-secrets*"]')
    for each in patterns:
        wanted = each.removeprefix(_DENIES)
        if not wanted or wanted.startswith(_DENIES) or not wanted.isprintable():
            raise OperatorError(f"{name} has {quoted(each, 64)}, which is no pattern")
        if each == wanted and name in _CLOSED and (not each.startswith("/") or set(each) & set("*?[")):
            raise OperatorError(f"{name} has {quoted(each, 64)}: name a directory, as /var/log/nginx")
