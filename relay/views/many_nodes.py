"""Asks several nodes at once: each by a call of its own through the gateway, a few side by side.

A node that fails does not fail the others. Must not decide which nodes are asked.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from relay.auth.permissions import SCOPE_OF_SAFETY_CLASS
from relay.calls.call_record import CallAnswer, CallRequest
from relay.calls.envelope import Call
from relay.calls.gateway import CallGateway
from relay.calls.relay_tools import ParentCall, RelayToolCall
from relay.views.node_choice import Member, Members
from schemas.errors import Failure, ToolError
from schemas.meta_names import META_IDEMPOTENCY_KEY, META_PROGRESS_TOKEN

SIDE_BY_SIDE = 16
MAX_ANSWER_BYTES = 320 * 1024
"""An answer has its result twice, as text and as structured content: so it stays below the mebibyte at which
clients close a stream."""

_MARGIN_S = 0.1  # the nodes end first, so that what they answered can be sent before the deadline
_LEAST_S = 0.05  # a node that is called with less to answer in could only fail
_ENTRY_BYTES = 256
_READ = frozenset({SCOPE_OF_SAFETY_CLASS["read_only"]})


class ManyNodes:
    """Asks nodes by ``gateway``, whose clock ``monotonic`` is."""

    def __init__(self, gateway: CallGateway, monotonic: Callable[[], float]) -> None:
        self._gateway = gateway
        self._monotonic = monotonic

    async def ask(self, call: RelayToolCall, chosen: Members, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the nodes that were ``chosen`` answer to the tool of ``call`` with ``arguments``."""
        members = chosen.nodes
        answers: list[CallAnswer | None] = [None] * len(members)
        request = _MemberRequests(call, arguments, call.ends - _MARGIN_S)
        pending = iter(range(len(members)))
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(SIDE_BY_SIDE, len(members))):
                tasks.create_task(self._ask_next(pending, members, request, answers))
        results = [_entry(member, answer) for member, answer in zip(members, answers, strict=True)]
        answered = sum(entry["ok"] for entry in results)
        sizes = [len(answer.text) + _ENTRY_BYTES if answer else _ENTRY_BYTES for answer in answers]
        shown = _fitting(results, sizes)
        result = {
            "results": shown,
            "asked": len(members),
            "answered": answered,
            "failed": len(members) - answered,
        }
        return {**result, "truncated": True} if chosen.truncated or len(shown) < len(results) else result

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
        hidden = (META_IDEMPOTENCY_KEY, META_PROGRESS_TOKEN)
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


def _entry(member: Member, answer: CallAnswer | None) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "node_id": member.node_id,
        "label": member.label or None,
        "manifest_etag": member.manifest_etag,
        "ok": answer is not None and answer.error is None,
    }
    if answer is None:
        late = ToolError(Failure.DEADLINE_EXCEEDED, "No time was left; the node was not called.")
        return {**entry, "error": late.envelope()}
    return (
        {**entry, "error": answer.error} if answer.error is not None else {**entry, "result": answer.result}
    )


def _fitting(results: Sequence[dict[str, Any]], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Return the entries that fit into one answer: each as long as there is space for it."""
    shown, left = [], MAX_ANSWER_BYTES
    for entry, size in zip(results, sizes, strict=True):
        if size <= left:
            shown.append(entry)
            left -= size
    return shown
