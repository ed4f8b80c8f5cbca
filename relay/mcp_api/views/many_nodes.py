"""Asks several nodes at once: each by a call of its own through the gateway, a few side by side.

A node that fails does not fail the others. What of the results an answer shows is chosen by a query: some
fields, sorted by a number, where a comparison is true. Paths lead through the members of a result, as
``cpu.usage_pct``; one that its schema does not have is refused, so that a spelling mistake is no empty
answer. Must not know a kind by name, nor decide which nodes are asked.
"""

import asyncio
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from attrs import define

from relay.auth.permissions import SCOPE_OF_SAFETY_CLASS, Rights
from relay.calls.executor import CallRequest
from relay.calls.gateway import CallGateway
from relay.calls.relay_tools import DirectedCall, ParentCall, RelayToolCall
from relay.calls.results import CallAnswer
from relay.observability.ascii_json import encoded
from schemas.errors import Failure, ToolError
from schemas.text import nearest

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
        self._paths = [path for path, _ in _paths(output)]
        self._numbers = [path for path, is_number in _paths(output) if is_number]

    def read(self, arguments: Mapping[str, Any]) -> AnswerQuery:
        """Return the query of ``arguments``, which fit the tool's input document.

        Raises:
            ToolError: one of its members has not its form, or names what results do not have.
        """
        sort, _, order = arguments.get("sort", "").partition(" ")
        if order not in {"", _ASCENDING, "desc"}:
            raise _malformed("sort", "cpu.usage_pct asc")
        where = None
        if "where" in arguments:
            match = _COMPARISON.fullmatch(arguments["where"])
            if match is None:
                raise _malformed("where", "cpu.usage_pct > 80")
            where = Comparison(match["path"], _SIGNS[match["sign"]], float(match["limit"]))
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


def _malformed(member: str, example: str) -> ToolError:
    text = f"{member}: it does not have the form of `{example}`."
    return ToolError(Failure.ARGUMENTS_INVALID, text, fix=f"Send {member} as in `{example}`.")


def _paths(schema: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, bool]]:
    """Yield each path of a schema, and whether a number is there."""
    for name, rules in schema.get("properties", {}).items():
        types = rules.get("type", ())
        yield (
            before + name,
            not {"number", "integer"}.isdisjoint([types] if isinstance(types, str) else types),
        )
        yield from _paths(rules, f"{before}{name}.")


def _at(result: Any, path: str) -> Any:
    for name in path.split("."):
        result = result.get(name) if isinstance(result, dict) else None
    return result


def _number(result: Mapping[str, Any], path: str) -> float | None:
    value = _at(result, path)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


@dataclass(frozen=True, slots=True)
class Member:
    """One node to ask: what its entry has, whatever it answers.

    Attributes:
        manifest_etag: of the manifest that was valid when it was chosen; None if there was none.
    """

    node_id: str
    label: str
    manifest_etag: str | None


@dataclass(frozen=True, slots=True)
class Members:
    """The nodes that are asked.

    Attributes:
        more: whether others that were selected are not.
        by_id: whether they are in the order of their ids, so that the last one shows where to go on.
    """

    nodes: Sequence[Member]
    more: bool
    by_id: bool


ToNode = Callable[[str, Rights], DirectedCall]
"""Returns the call of the node of that id, for a caller with these rights. It raises ToolError."""

SIDE_BY_SIDE = 16
MAX_ANSWER_BYTES = 320 * 1024
"""An answer has its result twice, as text and as structured content: so it stays below the mebibyte at which
clients close a stream."""

_MARGIN_S = 0.1  # the nodes end first, so that what they answered can be sent before the deadline
_LEAST_S = 0.05  # a node that is called with less to answer in could only fail
_ENTRY_BYTES = 256
_LATE = ToolError(Failure.DEADLINE_EXCEEDED, "No time was left; the node was not called.")
_READ = frozenset({SCOPE_OF_SAFETY_CLASS["read_only"]})


@define(eq=False, repr=False)
class ManyNodes:
    """Asks nodes by ``gateway``, whose clock ``monotonic`` is."""

    _gateway: CallGateway
    _monotonic: Callable[[], float]

    async def ask(
        self, call: RelayToolCall, chosen: Members, to_node: ToNode, query: AnswerQuery
    ) -> dict[str, Any]:
        """Return what ``query`` shows of the answers of the ``chosen`` to the tool of ``call``."""
        members = chosen.nodes
        answers: list[CallAnswer | None] = [None] * len(members)
        # They can do no more than read, whatever their caller can.
        principal = replace(call.caller.principal, scopes=call.caller.principal.scopes & _READ)
        caller, part = call.caller._replace(principal=principal, size=0), call.call.part()
        pending, all_end = iter(range(len(members))), call.ends - _MARGIN_S

        async def ask_next() -> None:
            for number in pending:
                now = self._monotonic()
                if (left_s := all_end - now) > _LEAST_S:
                    # While others wait for their turn, half of it: sixteen that hang must not use up all.
                    is_awaited = number + SIDE_BY_SIDE < len(members)
                    directed = partial(to_node, members[number].node_id)
                    parent = ParentCall(
                        call.correlation_id, now + left_s / 2 if is_awaited else all_end, directed
                    )
                    request = CallRequest(caller, part, None, call.selection, parent)
                    answers[number] = await self._gateway.call(request)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(SIDE_BY_SIDE, len(members))):
                tasks.create_task(ask_next())
        results = [answer.result if answer is not None else None for answer in answers]
        answered = len(results) - results.count(None)
        counts: dict[str, Any] = {
            "asked": len(members),
            "answered": answered,
            "failed": len(members) - answered,
        }
        positions = list(range(len(members)))
        if query.ranks:
            positions, lacking = query.ranked(results)
            counts["matched"] = len(positions)
            if lacking:
                counts["lacking"] = lacking
            failed = [answer for answer in answers if answer is None or answer.result is None]
            if failures := Counter(map(_code, failed)):
                counts["failures"] = [{"code": code, "nodes": nodes} for code, nodes in failures.items()]
        shown = _fitting([(members[at], answers[at]) for at in positions[: query.top]], query)
        is_cut = chosen.more or len(shown) < len(positions)
        if chosen.by_id and (chosen.more if query.ranks else is_cut):
            counts["next"] = members[-1 if query.ranks else len(shown) - 1].node_id
        return {"results": shown, **counts, "truncated": True} if is_cut else {"results": shown, **counts}


def _entry(member: Member, answer: CallAnswer | None, query: AnswerQuery) -> dict[str, Any]:
    entry: dict[str, Any] = {"node_id": member.node_id, "label": member.label or None}
    if not query.fields:
        entry["manifest_etag"] = member.manifest_etag
    if answer is None:
        return {**entry, "ok": False, "error": _LATE.envelope()}
    if answer.result is None:
        return {**entry, "ok": False, "error": answer.error}
    if query.fields:
        return {**entry, "ok": True, "values": query.values(answer.result)}
    return {**entry, "ok": True, "result": answer.result}


def _fitting(answers: Sequence[tuple[Member, CallAnswer | None]], query: AnswerQuery) -> list[dict[str, Any]]:
    """Return the entries that fit into one answer; there is space for at least one."""
    shown, left = list[dict[str, Any]](), MAX_ANSWER_BYTES
    for member, answer in answers:
        entry = _entry(member, answer, query)
        text = encoded(entry["values"]) if "values" in entry else answer.text if answer else ""
        left -= len(text) + _ENTRY_BYTES
        if shown and left < 0:
            break
        shown.append(entry)
    return shown


def _code(answer: CallAnswer | None) -> str:
    error = answer.error if answer is not None else None
    return _LATE.failure.value.code if error is None else str(error["code"])
