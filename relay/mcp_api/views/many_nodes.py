"""Asks several nodes at once: each by a call of its own through the gateway, a few side by side.

A node that fails does not fail the others. Must not decide which nodes are asked.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from relay.ascii_json import encoded
from relay.auth.permissions import SCOPE_OF_SAFETY_CLASS
from relay.calls.call_record import CallAnswer, CallRequest
from relay.calls.envelope import Call
from relay.calls.gateway import CallGateway
from relay.calls.relay_tools import ParentCall, RelayToolCall
from relay.mcp_api.views.answer_query import AnswerQuery
from relay.mcp_api.views.node_choice import Member, Members
from schemas.errors import Failure, ToolError
from schemas.projection import META_FOLLOW_S, META_IDEMPOTENCY_KEY, META_PROGRESS_TOKEN

SIDE_BY_SIDE = 16
MAX_ANSWER_BYTES = 320 * 1024
"""An answer has its result twice, as text and as structured content: so it stays below the mebibyte at which
clients close a stream."""

_MARGIN_S = 0.1  # the nodes end first, so that what they answered can be sent before the deadline
_LEAST_S = 0.05  # a node that is called with less to answer in could only fail
_ENTRY_BYTES = 256
_LATE = ToolError(Failure.DEADLINE_EXCEEDED, "No time was left; the node was not called.")
_READ = frozenset({SCOPE_OF_SAFETY_CLASS["read_only"]})


class ManyNodes:
    """Asks nodes by ``gateway``, whose clock ``monotonic`` is."""

    def __init__(self, gateway: CallGateway, monotonic: Callable[[], float]) -> None:
        self._gateway = gateway
        self._monotonic = monotonic

    async def ask(
        self, call: RelayToolCall, chosen: Members, arguments: Mapping[str, Any], query: AnswerQuery
    ) -> dict[str, Any]:
        """Return what ``query`` shows of the answers of the ``chosen`` to the tool of ``call``."""
        members = chosen.nodes
        answers: list[CallAnswer | None] = [None] * len(members)
        request = _MemberRequests(call, arguments, call.ends - _MARGIN_S)
        pending = iter(range(len(members)))
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(SIDE_BY_SIDE, len(members))):
                tasks.create_task(self._ask_next(pending, members, request, answers))
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

    async def _ask_next(
        self,
        pending: Iterator[int],
        members: Sequence[Member],
        requests: "_MemberRequests",
        answers: list[CallAnswer | None],
    ) -> None:
        for number in pending:
            now = self._monotonic()
            if (left_s := requests.ends - now) > _LEAST_S:
                # While others wait for their turn, half of it: sixteen that hang must not use up all.
                is_awaited = number + SIDE_BY_SIDE < len(members)
                ends = now + left_s / 2 if is_awaited else requests.ends
                answers[number] = await self._gateway.call(requests.of(members[number].node_id, ends))


class _MemberRequests:
    """The requests of one call's members. They can do no more than read, whatever its caller can."""

    def __init__(self, call: RelayToolCall, arguments: Mapping[str, Any], ends: float) -> None:
        self.ends = ends
        self._call = call
        self._arguments = arguments
        principal = call.caller.principal
        reading = replace(principal, scopes=principal.scopes & _READ)
        self._caller = call.caller._replace(principal=reading, size=0)
        hidden = (META_FOLLOW_S, META_IDEMPOTENCY_KEY, META_PROGRESS_TOKEN)
        self._meta = {key: value for key, value in call.call.meta.items() if key not in hidden}

    def of(self, node_id: str, ends: float) -> CallRequest:
        """Return the request to one node, to be over when the clock shows ``ends``."""
        params = {
            "name": self._call.call.name,
            "arguments": {**self._arguments, "node": node_id},
            "_meta": self._meta,
        }
        message = {"jsonrpc": "2.0", "id": self._call.call.message["id"], "method": "tools/call"}
        call = Call({**message, "params": params})
        call.trace, call.given_id = self._call.call.trace, self._call.call.given_id
        parent = ParentCall(self._call.correlation_id, ends)
        return CallRequest(self._caller, call, None, self._call.selection, parent)


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
