"""The tools of the kinds view: one for each kind and verb, for one node or for several.

With ``node``, a call is directed to that node's tool, and is that call, followed for a while if it asks for
that. With ``nodes``, the relay answers: it makes a call of its own to each. The schemas are those of the
verb, with the nodes to ask and their answers: one object each, without ``oneOf`` or ``anyOf`` at its root,
which several models' APIs refuse; which members go together is checked in code. Must not know a kind by name,
nor send a command.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

from pydantic_core import from_json

from relay.auth.permissions import Rights
from relay.calls.relay_tools import DirectedCall, RelayTool, RelayToolCall
from relay.fleet.selection import Selection
from relay.fleet.tools import ToolSchemas
from relay.mcp_api.views.many_nodes import AnswerQueries, AnswerQuery, ManyNodes
from relay.mcp_api.views.node_choice import NodeChoice
from schemas.addresses import View
from schemas.errors import Failure, ToolError
from schemas.kinds import Kind, Verb
from schemas.registry import SchemaRegistry, listed_schema, outlined
from schemas.times import moments_of, with_iso
from schemas.violations import ViolationError

MAX_NUMBERS = 128
"""Of so many numbers, the first of a sample, an answer has statistics: a sample may have thousands."""


def summed_up(samples: Sequence[Mapping[str, Any]], moments: Mapping[str, str]) -> dict[str, Any]:
    """Return the summary of ``samples``, whose ``moments`` are times and no measurements."""
    moment = next(iter(moments.values()), "")
    dated = [with_iso(sample, moments) for sample in samples]
    measured = [{key: value for key, value in sample.items() if key not in moments} for sample in samples]
    return {
        "times": [sample[moment] for sample in dated if moment in sample],
        "numbers": [
            {
                "name": path,
                "min": min(values),
                # A sum of what a node states may be beyond what a number holds.
                "mean": round(sum(value / len(values) for value in values), 3),
                "max": max(values),
            }
            for path, values in islice(_series(measured), MAX_NUMBERS)
        ],
    }


def _series(found: Sequence[Any], path: str = "") -> Iterator[tuple[str, list[float]]]:
    """Yield the numbers at ``path`` and below it, where ``found`` is what each sample has there."""
    if values := [each for each in found if isinstance(each, int | float) and not isinstance(each, bool)]:
        yield path, values
    objects = [each if isinstance(each, dict) else {} for each in found]
    for name in dict.fromkeys(chain.from_iterable(objects)):
        yield from _series([each.get(name) for each in objects], f"{path}.{name}" if path else name)
    if isinstance(found[-1], list):
        for place, item in _items([each for each in found if isinstance(each, list)]):
            yield from _series(item, f"{path}.{place}")


def _items(lists: Sequence[list[Any]]) -> Iterator[tuple[int, Sequence[Any]]]:
    """Yield the place of each item in the last list, and that item of all lists that have it.

    A node leaves out what it cannot read, so the same place may be another disk or sensor. Where the texts of
    the items are not the same in all lists, they tell the items apart; others are left out.
    """
    texts = [[_texts_of(item) for item in items] for items in lists]
    if all(of_list == texts[-1] for of_list in texts):
        yield from enumerate(zip(*lists, strict=True))
        return
    by_texts = [dict(zip(of_list, items, strict=True)) for of_list, items in zip(texts, lists, strict=True)]
    repeated = {key for of_list in texts for key, times in Counter(of_list).items() if times > 1}
    for place, key in enumerate(texts[-1]):
        if key and key not in repeated:
            yield place, [items[key] for items in by_texts if key in items]


def _texts_of(item: Any) -> frozenset[tuple[str, str]]:
    members = item.items() if isinstance(item, dict) else ()
    return frozenset((name, value) for name, value in members if isinstance(value, str))


NODES = "nodes"
FOR_S = "for_s"
QUERY = frozenset({"sort", "where", "top", "fields", "cursor"})

_FIRST, _SECOND = "1.0.0", "1.1.0"
"""The versions of this view's documents. A verb may have members of the names that came with the second."""
_CHOOSING = frozenset({"node", "capability"})
_ANSWERS = frozenset({"results", "asked", "answered", "failed", "truncated"})
_OF_QUERY = frozenset({"matched", "lacking", "failures", "next"})

_OF_EACH = {
    "result": {"type": "object", "description": "As for node."},
    "error": {"type": "object", "description": "If not ok: why."},
}
# Of the root of a verb's output, what is true of both forms of an answer.
_KEPT = ("title", "description", "additionalProperties", "$defs")


def kind_schemas(registry: SchemaRegistry, verb: Verb, *, takes_many: bool) -> ToolSchemas:
    """Return the schemas of the tool for ``verb``; ``takes_many``: whether it can ask several nodes.

    A verb with a member of the same name as one to follow or to query by is served without these.

    Raises:
        ValueError: the verb has a member of the same name as another one of the kinds view's.
    """
    own_input, own_output = (listed_schema(registry, ref) for ref in (verb.input_ref, verb.output_ref))
    dated = _dated(own_output)
    choosing, answers = _CHOOSING | ({NODES} if takes_many else set()), _ANSWERS if takes_many else set()
    extra_choosing = (QUERY if takes_many else set()) | ({FOR_S} if verb.streams else set())
    extra_answers = (_OF_QUERY if takes_many else set()) | ({"followed"} if verb.streams else set())
    version = _FIRST
    if not (_members(own_input) & extra_choosing or _members(dated) & extra_answers):
        version, choosing, answers = _SECOND, choosing | extra_choosing, answers | extra_answers
    input_ref, output_ref = f"kind_call.input@{version}", f"kind_call.output@{version}"
    asked, answered = listed_schema(registry, input_ref), listed_schema(registry, output_ref)
    answered["properties"]["results"]["items"]["properties"] |= _OF_EACH
    return ToolSchemas(
        arguments=registry.load(input_ref),
        result=registry.load(output_ref),
        input_schema={**own_input, "properties": _together(_only(asked, choosing), own_input, verb)},
        # Nothing is required at the root: the members of one form are not those of the other.
        output_schema={
            "type": "object",
            **{key: dated[key] for key in _KEPT if key in dated},
            "properties": {
                name: outlined(rules)
                for name, rules in _together(dated, _only(answered, answers), verb).items()
            },
        },
    )


def _members(schema: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(schema.get("properties", {}))


def _dated(output: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a verb's output with the ISO form of its times beside them."""
    moments, properties = moments_of(output), dict[str, Any]()
    for name, rules in output.get("properties", {}).items():
        properties[name] = rules
        if name in moments:
            properties[moments[name]] = {"type": "string"}
    return {**output, "properties": properties} if properties else dict(output)


def _only(schema: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    properties = {name: rules for name, rules in schema["properties"].items() if name in names}
    return {**schema, "properties": properties}


def _together(first: Mapping[str, Any], second: Mapping[str, Any], verb: Verb) -> dict[str, Any]:
    one, other = first.get("properties", {}), second.get("properties", {})
    if both := one.keys() & other.keys():
        raise ValueError(f"{verb.name}: the members {sorted(both)} have a meaning in the kinds view")
    return {**one, **other}


_ONE = " Name the node with `node`."
_MANY = (
    " Or ask many at once with `nodes`; the answer has an entry for each, or what `sort`, `where`, `top` and "
    "`fields` leave. `find_nodes` finds nodes."
)
_FOR_S = " With `for_s`, the answer comes after so many seconds, with statistics."
_PLACES = ("", "results.result.", "results.values.")
"""Where a node's result stands: alone, among those of several nodes, and where `fields` chooses of it."""


class KindTool:
    """The tool for one verb of one kind.

    Raises:
        ValueError: the verb has a member of the same name as one of this view's.
    """

    def __init__(
        self, registry: SchemaRegistry, kind: Kind, verb: Verb, choice: NodeChoice, many: ManyNodes
    ) -> None:
        self._kind = kind
        self._verb = verb
        self._kind_verb = kind.short, verb.name
        # The images of a hundred nodes are more than one answer holds.
        self._takes_many = kind.safety_class == "read_only" and not verb.streams and not verb.images
        self._schemas = kind_schemas(registry, verb, takes_many=self._takes_many)
        self._arguments = registry.load(verb.input_ref)
        own, output = registry.document(verb.input_ref), registry.document(verb.output_ref)
        self._added = self._schemas.input_schema["properties"].keys() - own.get("properties", {}).keys()
        self._moments = moments_of(output)
        self._queries = AnswerQueries(output) if self._added >= QUERY else None
        self._choice = choice
        self._many = many

    def tool(self) -> RelayTool:
        return RelayTool(
            canonical=".".join(self._kind_verb),
            title=self._verb.title,
            description=self._verb.description
            + _ONE
            + (_MANY if self._takes_many else "")
            + (_FOR_S if FOR_S in self._added else ""),
            schemas=self._schemas,
            schema_ref=self._verb.input_ref,
            safety_class=self._kind.safety_class,
            idempotent=self._verb.idempotent,
            visible=lambda rights: bool(rights.safety_classes) and rights.admit(self._kind),
            answer=self._answer,
            views=frozenset({View.KINDS}),
            kind_verb=self._kind_verb,
            directed=self._directed,
            follows=self._verb.streams,
            asks=self._verb.asks,
            untrusted=tuple(f"{before}{path}" for path in self._verb.untrusted for before in _PLACES),
        )

    def _directed(
        self, rights: Rights, selection: Selection, arguments: Mapping[str, Any]
    ) -> DirectedCall | None:
        """Return the call of the one node's tool; None if there are several to ask."""
        if NODES in arguments:
            if "node" in arguments:
                raise _unfit("node and nodes exclude each other.", "Send one of the two.")
            if not self._takes_many:
                raise _unfit("nodes: this tool asks one node.", "Send node in its place.")
            return None
        if "node" not in arguments:
            raise _unfit("node: no node is named.", "Send node; find_nodes finds nodes.")
        if self._queries is not None and (of_many := sorted(QUERY & arguments.keys())):
            raise _unfit(
                f"{of_many[0]}: it goes with nodes, not with node.", "Send nodes in the place of node."
            )
        node_id = self._choice.node(rights, selection, arguments["node"])
        tool = self._choice.tool(rights, node_id, self._kind_verb, arguments.get("capability"))
        for_s = arguments.get(FOR_S) if FOR_S in self._added else None
        shown = self._dated if for_s is None else self._summed_up
        return DirectedCall(tool, self._own(arguments), shown, for_s)

    def _dated(self, result: Mapping[str, Any], _samples: Sequence[str]) -> Mapping[str, Any]:
        return with_iso(result, self._moments)

    def _summed_up(self, result: Mapping[str, Any], samples: Sequence[str]) -> Mapping[str, Any]:
        gathered = [from_json(sample) for sample in samples] or [result]
        return {**with_iso(result, self._moments), "followed": summed_up(gathered, self._moments)}

    async def _answer(self, call: RelayToolCall) -> Mapping[str, Any]:
        own = self._own(call.arguments)
        try:
            self._arguments.check(own)
        except ViolationError as violation:
            raise ToolError.from_violation(violation) from None
        if not call.selection.admits_kind(self._kind.short):
            raise ToolError(Failure.NAME_UNKNOWN)
        given = call.arguments[NODES]
        selectors = [given] if isinstance(given, str) else given
        query = AnswerQuery() if self._queries is None else self._queries.read(call.arguments)
        chosen = self._choice.members(
            call.caller.principal, call.selection, self._kind_verb, selectors, query
        )
        capability = call.arguments.get("capability")

        def to_node(node_id: str, rights: Rights) -> DirectedCall:
            return DirectedCall(
                self._choice.tool(rights, node_id, self._kind_verb, capability), own, self._dated
            )

        answer = await self._many.ask(call, chosen, to_node, query)
        if self._queries is None:
            answer.pop("next", None)
        return answer

    def _own(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in arguments.items() if name not in self._added}


def _unfit(text: str, fix: str) -> ToolError:
    return ToolError(Failure.ARGUMENTS_INVALID, text, fix=fix)
