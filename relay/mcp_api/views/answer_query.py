"""What of many nodes' results an answer shows: some fields, sorted by a number, where a comparison is true.

Paths lead through the members of a result, as ``cpu.usage_pct``; one that its schema does not have is
refused, so that a spelling mistake is no empty answer. Must not know a kind by name, nor call a node.
"""

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from schemas.errors import Failure, ToolError
from schemas.unknown_names import nearest

PAGE = 100
"""How many nodes an answer shows at most, and how many are asked where all that are asked are shown."""
MOST_RANKED = 1000
"""How many nodes are asked where the answer shows a choice of them."""

_COMPARISON = re.compile(
    r"(?P<path>[a-zA-Z0-9_.]+) ?(?P<sign><=|>=|<|>|!=|==?) ?(?P<limit>-?[0-9]{1,18}(\.[0-9]{1,9})?)"
)
_SIGNS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
}
_ASCENDING = "asc"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What must be true of a number of a result."""

    path: str
    holds: Callable[[float, float], bool]
    limit: float


@dataclass(frozen=True, slots=True)
class AnswerQuery:
    """What one call asks for.

    Attributes:
        top: how many nodes are shown.
        fields: what of each result is shown; empty for all of it.
        after: the node that the page before has ended with.
    """

    sort: str | None = None
    ascending: bool = False
    where: Comparison | None = None
    top: int = PAGE
    fields: tuple[str, ...] = ()
    after: str | None = None

    @property
    def ranks(self) -> bool:
        """Whether results must be known before it is known which are shown."""
        return self.sort is not None or self.where is not None

    @property
    def most_asked(self) -> int:
        return MOST_RANKED if self.ranks else self.top

    def values(self, result: Mapping[str, Any]) -> dict[str, Any]:
        found = {path: _at(result, path) for path in self.fields}
        return {path: value for path, value in found.items() if value is not None}

    def ranked(self, results: Sequence[Mapping[str, Any] | None]) -> tuple[list[int], int]:
        """Return the positions of the ``results`` that match, in order, and how many lack the number."""
        matching, lacking = list[tuple[float, int]](), 0
        for position, result in enumerate(results):
            if result is None:
                continue
            key = 0.0 if self.sort is None else _number(result, self.sort)
            compared = 0.0 if self.where is None else _number(result, self.where.path)
            if key is None or compared is None:
                lacking += 1
            elif self.where is None or self.where.holds(compared, self.where.limit):
                matching.append((key if self.ascending else -key, position))
        return [position for _, position in sorted(matching)], lacking


class AnswerQueries:
    """Reads the queries of one tool, whose results have the schema ``output``."""

    def __init__(self, output: Mapping[str, Any]) -> None:
        self._paths, self._numbers = list(_paths(output)), list(_numbers(output))

    def read(self, arguments: Mapping[str, Any]) -> AnswerQuery:
        """Return the query of ``arguments``, which fit the tool's input document.

        Raises:
            ToolError: one of its members has not its form, or names what results do not have.
        """
        sort, _, order = arguments.get("sort", "").partition(" ")
        if order not in {"", _ASCENDING, "desc"}:
            raise _malformed("sort", "cpu.usage_pct asc")
        where = _comparison(arguments["where"]) if "where" in arguments else None
        self._check("sort", sort or None, self._numbers)
        self._check("where", where.path if where else None, self._numbers)
        for path in arguments.get("fields", ()):
            self._check("fields", path, self._paths)
        return AnswerQuery(
            sort or None,
            order == _ASCENDING,
            where,
            int(arguments.get("top", PAGE)),
            tuple(arguments.get("fields", ())),
            arguments.get("cursor"),
        )

    def _check(self, member: str, path: str | None, known: Sequence[str]) -> None:
        if path is not None and path not in known:
            text = f"{member}: results have nothing of that name{nearest(path, known)}."
            raise ToolError(Failure.ARGUMENTS_INVALID, text, fix=f"Send one of: {', '.join(known)}.")


def _comparison(text: str) -> Comparison:
    match = _COMPARISON.fullmatch(text)
    if match is None:
        raise _malformed("where", "cpu.usage_pct > 80")
    return Comparison(match["path"], _SIGNS[match["sign"]], float(match["limit"]))


def _malformed(member: str, example: str) -> ToolError:
    text = f"{member}: it does not have the form of `{example}`."
    return ToolError(Failure.ARGUMENTS_INVALID, text, fix=f"Send {member} as in `{example}`.")


def _paths(schema: Mapping[str, Any], before: str = "") -> Iterator[str]:
    for name, rules in schema.get("properties", {}).items():
        yield before + name
        yield from _paths(rules, f"{before}{name}.")


def _numbers(schema: Mapping[str, Any], before: str = "") -> Iterator[str]:
    for name, rules in schema.get("properties", {}).items():
        if rules.get("type") in {"number", "integer"}:
            yield before + name
        yield from _numbers(rules, f"{before}{name}.")


def _at(result: Any, path: str) -> Any:
    for name in path.split("."):
        result = result.get(name) if isinstance(result, dict) else None
    return result


def _number(result: Mapping[str, Any], path: str) -> float | None:
    value = _at(result, path)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
