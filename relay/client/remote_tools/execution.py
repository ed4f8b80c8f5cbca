"""One call, after every check has passed: its attempts, each recorded before and after, and its result.

A tool that is not idempotent has one attempt, and that is sent at most once. Whether another may be repeated
depends on the error. Must not decide whether a call is permitted.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from attrs import define
from mcp.client.session import ClientSession
from mcp.shared.dispatcher import ProgressFnT
from mcp.shared.exceptions import MCPError
from mcp_types import CallToolRequest, CallToolRequestParams, CallToolResult
from pydantic import ValidationError

from relay.client.remote_tools.admission import unverified
from relay.client.remote_tools.audit import CallAudit, Recorded
from relay.client.remote_tools.catalogue import Catalogue, CatalogueEntry
from relay.client.remote_tools.connection import NotConnectedError, ServerConnection
from relay.client.remote_tools.errors import Reason, RemoteToolError, ToolProviderFailure, ToolTimeout
from relay.client.remote_tools.failures import FailureTable, of_fault, of_garbage, of_unexpected, remote_id
from relay.client.remote_tools.http_client import ATTEMPT, WireAttempt
from relay.client.remote_tools.tool_schemas import CheckProcess
from schemas.projection import META_CORRELATION_ID, META_IDEMPOTENCY_KEY, META_TRACEPARENT

HEADER_CORRELATION_ID = "X-Correlation-Id"
HEADER_TRACEPARENT = "traceparent"


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When a failed attempt is repeated: exponential delays with full jitter.

    ``attempts`` counts the first; 1 never repeats.
    """

    attempts: int = 4
    first_delay_s: float = 0.1
    longest_delay_s: float = 5.0

    def delay_s(self, attempt: int, retry_after_ms: int | None, chance: Callable[[], float]) -> float:
        """Return the seconds after failed ``attempt`` (1 is the first); ``chance`` is uniform in [0, 1).

        A server's ``retry_after_ms`` is a minimum; the jitter on top keeps callers from returning at once.
        """
        bound_s = min(self.longest_delay_s, self.first_delay_s * 2.0 ** min(attempt - 1, 32))
        return (retry_after_ms or 0) / 1000 + bound_s * chance()


@dataclass(frozen=True, slots=True)
class RemoteCall:
    """One call. ``deadline_at`` is a time of the event loop."""

    name: str
    arguments: Mapping[str, Any]
    correlation_id: str
    traceparent: str
    deadline_at: float
    on_progress: ProgressFnT | None = None


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a call.

    Attributes:
        structured: the structured content, which fits the output schema if the tool has one; None if absent.
        content: the content blocks as MCP has them. Text in them is the server's: untrusted.
        correlation_id: as in the audit records.
        attempts: how many attempts it took.
        remote_correlation_id: the id under which the server recorded the call, if it sent one.
    """

    structured: Any
    content: tuple[Any, ...]
    correlation_id: str
    attempts: int
    remote_correlation_id: str | None = None

    @property
    def text(self) -> str:
        """The text blocks, joined by line feeds."""
        return "\n".join(block.text for block in self.content if block.type == "text")


@define(eq=False, repr=False, kw_only=True)
class Execution:
    """Makes calls over ``connection``."""

    _connection: ServerConnection
    _checks: CheckProcess
    _audit: CallAudit
    _failures: FailureTable
    _retries: RetryPolicy
    _catalogue: Catalogue
    _new_id: Callable[[], str]
    _monotonic: Callable[[], float]
    _chance: Callable[[], float]
    _sleep: Callable[[float], Awaitable[None]]

    async def run(self, call: RemoteCall, entry: CatalogueEntry) -> ToolResult:
        """Make ``call``, and repeat it if it may be.

        Raises:
            RemoteToolError: it failed.
            AuditFailedError: an attempt could not be recorded.
        """
        attempts = self._retries.attempts if entry.contract.idempotent else 1
        meta = {META_CORRELATION_ID: call.correlation_id, META_TRACEPARENT: call.traceparent}
        if attempts > 1:
            meta[META_IDEMPOTENCY_KEY] = self._new_id()
        attempt, may_have_run = 1, False
        while True:
            try:
                return await self._attempt(call, entry, meta, attempt)
            except RemoteToolError as error:
                error.correlation_id = call.correlation_id
                # The attempts of one call, together: what a later one did not reach, an earlier one may have.
                error.may_have_run = may_have_run = may_have_run or error.may_have_run
                if attempt >= attempts or not error.retryable:
                    raise
                delay_s = self._retries.delay_s(attempt, error.retry_after_ms, self._chance)
                if asyncio.get_running_loop().time() + delay_s >= call.deadline_at:
                    raise
            await self._sleep(delay_s)
            attempt += 1

    async def _attempt(
        self, call: RemoteCall, entry: CatalogueEntry, meta: Mapping[str, str], attempt: int
    ) -> ToolResult:
        recorded = Recorded(call.correlation_id, call.name, entry.contract.risk, call.traceparent)
        self._audit.started(recorded, attempt, call.arguments)
        began_s = self._monotonic()
        known_as: str | None = None
        try:
            result = await self._sent(call, entry, meta)
            known_as = remote_id(result)
            await self._check(result, entry, call.deadline_at)
            await self._check_nodes(result, entry, call)
        except Exception as error:
            failure = error if isinstance(error, RemoteToolError) else of_unexpected(error)
            failure.remote_correlation_id = failure.remote_correlation_id or known_as
            took_ms = (self._monotonic() - began_s) * 1000
            self._audit.ended(
                recorded, attempt, took_ms, failure.reason, failure.code, failure.remote_correlation_id
            )
            if failure is error:
                raise
            raise failure from error
        except asyncio.CancelledError:
            self._audit.ended(recorded, attempt, (self._monotonic() - began_s) * 1000, Reason.CANCELLED)
            raise
        took_ms = (self._monotonic() - began_s) * 1000
        self._audit.ended(recorded, attempt, took_ms, remote_id=known_as, result=result.structured_content)
        return ToolResult(
            result.structured_content, tuple(result.content), call.correlation_id, attempt, known_as
        )

    async def _sent(self, call: RemoteCall, entry: CatalogueEntry, meta: Mapping[str, str]) -> CallToolResult:
        idempotent = entry.contract.idempotent
        wire = WireAttempt(
            headers={HEADER_CORRELATION_ID: call.correlation_id, HEADER_TRACEPARENT: call.traceparent},
            may_repeat=idempotent,
        )
        connected = False
        try:
            async with asyncio.timeout_at(call.deadline_at):
                session = await self._connection.session()
                if not await self._catalogue.is_unchanged(entry):
                    raise ToolProviderFailure(
                        "The tool changed after the call was checked; it was not sent.",
                        reason=Reason.CONTRACT,
                        suggested_fix="Call again: the call is checked against the tool as it is now.",
                    )
                connected = True
                return await _request(session, call, meta, wire)
        except TimeoutError:
            raise ToolTimeout(
                "There was no answer within the deadline.",
                reason=Reason.DEADLINE,
                suggested_fix="Check the effect of the call before calling again, or allow more time.",
                retryable=idempotent,
                may_have_run=connected,
            ) from None
        except NotConnectedError as error:
            raise self._failures.of_connecting(error) from error
        except MCPError as error:
            if self._connection.has_ended(wire, error):
                raise of_fault(Reason.CONNECTION_LOST, wire, idempotent=idempotent) from None
            raise self._failures.of_jsonrpc(error, wire, idempotent=idempotent) from None
        except ValidationError:
            # Without the text of the library, which contains the answer.
            raise of_garbage() from None

    async def _check_nodes(self, result: CallToolResult, entry: CatalogueEntry, call: RemoteCall) -> None:
        try:
            async with asyncio.timeout_at(call.deadline_at):
                fault = await self._catalogue.check_answered(entry, result.structured_content)
        except TimeoutError:
            fault = "its manifest could not be verified within the deadline"
        except NotConnectedError as error:
            raise self._failures.of_connecting(error) from error
        if fault is not None:
            raise unverified(fault, may_have_run=True)

    async def _check(self, result: CallToolResult, entry: CatalogueEntry, deadline_at: float) -> None:
        if result.is_error:
            contract = entry.contract
            raise self._failures.of_result(result, contract.name, idempotent=contract.idempotent)
        if entry.result is None:
            return
        fault = "it has no structured content"
        if result.structured_content is not None:
            fault = await self._checks.fault(entry.result, result.structured_content, deadline_at) or ""
        if fault:
            raise ToolProviderFailure(
                f"The result does not fit the output schema of the tool: {fault}.",
                reason=Reason.RESULT,
                suggested_fix="Report this to the operator of the server.",
                may_have_run=True,
            )


async def _request(session: ClientSession, call: RemoteCall, meta: Any, wire: WireAttempt) -> CallToolResult:
    # Not ``call_tool``: it validates by a library that can be made slow, and may list the tools in between.
    request = CallToolRequest(
        params=CallToolRequestParams(name=call.name, arguments=dict(call.arguments), _meta=meta)
    )
    token = ATTEMPT.set(wire)
    try:
        return await session.send_request(request, CallToolResult, progress_callback=call.on_progress)
    finally:
        ATTEMPT.reset(token)
