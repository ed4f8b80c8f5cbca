"""The tools of the kinds view: one for each kind and verb, for one node or for several.

With ``node``, a call is directed to that node's tool, and is that call, followed for a while if it asks for
that. With ``nodes``, the relay answers: it makes a call of its own to each. Must not send a command.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from relay.auth.permissions import Rights
from relay.calls.relay_tools import DirectedCall, RelayTool, RelayToolCall
from relay.fleet.selection import Selection
from relay.mcp_api.views.answer_query import AnswerQueries, AnswerQuery
from relay.mcp_api.views.kind_schemas import FOR_S, NODES, QUERY, kind_schemas
from relay.mcp_api.views.many_nodes import ManyNodes
from relay.mcp_api.views.node_choice import NodeChoice
from relay.mcp_api.views.sample_summary import summed_up
from relay.settings.config import View
from schemas.errors import Failure, ToolError
from schemas.kinds import Kind, Verb
from schemas.registry import SchemaRegistry
from schemas.times import moments_of, with_iso
from schemas.violations import ViolationError

_ONE = " Name the node with `node`: its label, its id, or the first 6 or more characters of its id."
_MANY = (
    " Or ask many at once with `nodes`, a list of labels, ids, tags such as `site=north` or `tag:gateway`, "
    "or `*` for all; the answer has an entry for each, or what `sort`, `where`, `top` and `fields` leave. "
    "`find_nodes` finds nodes."
)
_FOR_S = " With `for_s`, the answer comes after so many seconds, with statistics."


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
        self._offer = kind.short, verb.name
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
        """Return the tool, to be registered."""
        return RelayTool(
            canonical=".".join(self._offer),
            title=self._verb.title,
            description=self._described(),
            schemas=self._schemas,
            schema_ref=self._verb.input_ref,
            safety_class=self._kind.safety_class,
            idempotent=self._verb.idempotent,
            visible=_may_call,
            answer=self._answer,
            views=frozenset({View.KINDS}),
            offer=self._offer,
            directed=self._directed,
            follows=self._verb.streams,
        )

    def _described(self) -> str:
        more = (_MANY if self._takes_many else "") + (_FOR_S if FOR_S in self._added else "")
        return self._verb.description + _ONE + more

    def _directed(
        self, rights: Rights, selection: Selection, arguments: Mapping[str, Any]
    ) -> DirectedCall | None:
        """Return the call of the one node's tool; None if there are several to ask.

        Raises:
            ToolError: the members do not go together, or the node has no such tool for the caller.
        """
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
        canonical = self._choice.tool(rights, node_id, self._offer, arguments.get("capability"))
        for_s = arguments.get(FOR_S) if FOR_S in self._added else None
        shown = self._dated if for_s is None else self._summed_up
        return DirectedCall(canonical, self._own(arguments), shown, for_s)

    def _dated(self, result: Mapping[str, Any], _samples: Sequence[str]) -> Mapping[str, Any]:
        return with_iso(result, self._moments)

    def _summed_up(self, result: Mapping[str, Any], samples: Sequence[str]) -> Mapping[str, Any]:
        gathered = [from_json(sample) for sample in samples] or [result]
        return {**with_iso(result, self._moments), "followed": summed_up(gathered, self._moments)}

    async def _answer(self, call: RelayToolCall) -> Mapping[str, Any]:
        """Return what several nodes answer.

        Raises:
            ToolError: the arguments do not fit the verb, or a selector means no node.
        """
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
        chosen = self._choice.members(call.caller.principal, call.selection, self._offer, selectors, query)
        if "capability" in call.arguments:
            own["capability"] = call.arguments["capability"]
        answer = await self._many.ask(call, chosen, own, query)
        if self._queries is None:
            answer.pop("next", None)
        return answer

    def _own(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments for the verb itself."""
        return {name: value for name, value in arguments.items() if name not in self._added}


def _may_call(rights: Rights) -> bool:
    return bool(rights.safety_classes)


def _unfit(text: str, fix: str) -> ToolError:
    return ToolError(Failure.ARGUMENTS_INVALID, text, fix=fix)
