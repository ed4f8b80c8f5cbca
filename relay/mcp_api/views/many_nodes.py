"""Asks several nodes at once: each by a call of its own through the gateway, a few side by side.

A node that fails does not fail the others. Must not decide which nodes are asked.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from attrs import define

from relay.ascii_json import encoded
from relay.auth.permissions import SCOPE_OF_SAFETY_CLASS, Rights
from relay.calls.call_record import CallAnswer, CallRequest
from relay.calls.gateway import CallGateway
from relay.calls.relay_tools import DirectedCall, ParentCall, RelayToolCall
from relay.mcp_api.views.answer_query import AnswerQuery
from relay.mcp_api.views.node_choice import Member, Members
from schemas.errors import Failure, ToolError

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
            if failures := Counter(map(_code, filter(_has_failed, answers))):
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


def _has_failed(answer: CallAnswer | None) -> bool:
    return answer is None or answer.result is None


def _code(answer: CallAnswer | None) -> str:
    error = answer.error if answer is not None else None
    return _LATE.failure.value.code if error is None else str(error["code"])
