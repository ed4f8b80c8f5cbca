"""``RemoteTools``: what an agent runtime puts in front of an MCP server.

No call leaves unvalidated, unpermitted, uncorrelated or unaudited: ``execute`` checks in a fixed order, and
sends nothing of a call before every check has passed. Each attempt is recorded before and after it. A tool
that is not idempotent has one attempt, and that is sent at most once. Must not keep arguments or results.
"""

import asyncio
import logging
import os
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from mcp.client.session import ClientSession
from mcp.shared.dispatcher import ProgressFnT
from mcp.shared.exceptions import MCPError
from mcp_types import CallToolRequest, CallToolRequestParams, CallToolResult
from pydantic import ValidationError

from relay.client.remote_tools.admission import Admission, Budget, Meter, Permissions, unverified
from relay.client.remote_tools.audit import AuditSink, CallAudit, JsonLines, RemoteCall
from relay.client.remote_tools.catalogue import Catalogue, CatalogueEntry, ListingError
from relay.client.remote_tools.connection import NotConnectedError, ServerConnection
from relay.client.remote_tools.contracts import (
    ContractTerms,
    Pins,
    PinsError,
    ToolContract,
    ToolRule,
    is_deadline,
)
from relay.client.remote_tools.errors import (
    REFUSALS,
    Reason,
    RemoteToolError,
    ToolInvalidArguments,
    ToolNotFound,
    ToolProviderFailure,
    ToolTimeout,
)
from relay.client.remote_tools.failures import FailureTable, of_fault, of_garbage, of_unexpected, remote_id
from relay.client.remote_tools.manifests import ManifestVerifier
from relay.client.remote_tools.redaction import Redaction
from relay.client.remote_tools.servers import ATTEMPT, LEFT_OPEN_S, HttpServer, Server, WireAttempt
from relay.client.remote_tools.tool_schemas import CheckProcess, as_json
from schemas.pacing import Backoff
from schemas.projection import META_CORRELATION_ID, META_IDEMPOTENCY_KEY, META_TRACEPARENT
from schemas.text import nearest, printable
from schemas.times import SystemClock, SystemMs
from schemas.ulids import GIVEN_ID, UlidSource

LISTING_DEADLINE_S = 30.0
HEADER_CORRELATION_ID = "X-Correlation-Id"
HEADER_TRACEPARENT = "traceparent"

ResultT = TypeVar("ResultT")

_log = logging.getLogger("relay.remote_tools.client")
_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(frozen=True, slots=True)
class ClientEnvironment:
    """Time, randomness and waiting, which a test replaces."""

    now_ms: SystemClock = lambda: SystemMs(time.time_ns() // 1_000_000)
    monotonic: Callable[[], float] = time.monotonic
    random_bytes: Callable[[int], bytes] = os.urandom
    chance: Callable[[], float] = random.random
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When a failed attempt is repeated: exponential delays with full jitter.

    ``attempts`` counts the first; 1 never repeats.
    """

    attempts: int = 4
    first_delay_s: float = 0.1
    longest_delay_s: float = 5.0

    def backoff(self, chance: Callable[[], float]) -> Backoff:
        """Return the delays; ``chance`` is uniform in [0, 1)."""
        first_s = min(self.first_delay_s, self.longest_delay_s)
        return Backoff(first_s, self.longest_delay_s, lambda bound_s: bound_s * chance())


FOLLOWING = RetryPolicy(first_delay_s=1, longest_delay_s=60)
"""When a subscription to changes is made again that has ended."""


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


@dataclass(frozen=True, slots=True)
class Surveyed:
    """A listed tool, and why a call of it would be refused whatever its arguments; None if it would not."""

    contract: ToolContract
    refusal: RemoteToolError | None


class RemoteTools:
    """The tools of one MCP server, behind this caller's own checks.

        server = HttpServer("https://relay.example/mcp/kinds", BearerToken(Path("token")))
        async with RemoteTools(server, audit=Path("calls.jsonl"),
                               permissions=Permissions(allow=("sysecho-*",))) as tools:
            result = await tools.execute("sysecho-invoke", {"node": "greenhouse", "message": "ping"})

    Args:
        server: an ``HttpServer`` or ``StdioServer``, or the URL of one on this machine.
        audit: a file that records are appended to, or a function that takes each.
        permissions: what may be called; by default nothing.
        rules: what the operator states of tools: risk, idempotence, deadline, scopes.
        budget: how many calls may be made.
        pins: the file that remembers each tool as it was at its first use.
        verify_manifests: the PEM file of the root of this project's nodes: a tool whose signed manifest
            cannot be verified with it is refused.
        kinds: the kinds of installed packages that these manifests may contain besides those that ship.
        trust_annotations: whether the server's own statements may lower a risk, and permit repetition.
        redaction: the rules by which arguments and results are recorded; by default they are not.
        retries: how a call of an idempotent tool is repeated.
        deadline_s: the longest that a call may take whose contract states nothing else.
        mode: the protocol era, as ``mcp.Client`` has it.

    Raises:
        OperatorError, StateError, OSError: the URL, a deadline, the pins or the root cannot be used.
    """

    def __init__(  # noqa: PLR0913 - what an operator decides
        self,
        server: str | Server,
        *,
        audit: Path | AuditSink,
        permissions: Permissions | None = None,
        rules: Sequence[ToolRule] = (),
        budget: Budget | None = None,
        pins: Path | None = None,
        verify_manifests: Path | None = None,
        kinds: tuple[str, ...] = (),
        trust_annotations: bool = False,
        redaction: Redaction | None = None,
        retries: RetryPolicy | None = None,
        deadline_s: float | None = None,
        mode: str = "auto",
        environment: ClientEnvironment | None = None,
    ) -> None:
        self._environment = environment = environment or ClientEnvironment()
        server = HttpServer(server) if isinstance(server, str) else server
        self._ulids = UlidSource(environment.now_ms, environment.random_bytes)
        sink = JsonLines(audit, environment.monotonic) if isinstance(audit, Path) else audit
        self._file = sink if isinstance(sink, JsonLines) else None
        self._audit = CallAudit(sink, redaction, environment.now_ms)
        for_texts = redaction or Redaction()
        self._failures = FailureTable(for_texts)
        self._retries = retries or RetryPolicy()
        self._connection = ServerConnection(
            server,
            lambda: self._catalogue.stale(),  # noqa: PLW0108 - there is none yet
            for_texts,
            FOLLOWING.backoff(environment.chance),
            environment.sleep,
            mode,
        )
        self._terms = ContractTerms(rules, trust_annotations=trust_annotations, deadline_s=deadline_s)
        self._catalogue = Catalogue(
            self._connection,
            self._terms,
            Pins(pins, server.name) if pins is not None else None,
            ManifestVerifier(verify_manifests, environment.now_ms, kinds) if verify_manifests else None,
            environment.monotonic,
        )
        self._checks = CheckProcess()
        self._left: set[asyncio.Task[Any]] = set()
        meter = Meter(budget or Budget(), environment.monotonic)
        self._admission = Admission(permissions or Permissions(), meter, self._catalogue, self._checks)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection. The next call would open it again."""
        await self._checks.close()
        await self._connection.close()
        if self._left:  # without a connection nothing holds them up
            await asyncio.wait(self._left)
        if self._file is not None:
            self._file.close()

    async def list_tools(self, *, deadline_s: float = LISTING_DEADLINE_S) -> list[ToolContract]:
        """List the tools that may be called, and pin those that are new: what a model may be shown.

        Raises:
            RemoteToolError: the server did not list them.
        """
        surveyed = await self._surveyed(self._admission.permissions.admits, deadline_s)
        usable = [entry for entry, refusal in surveyed if refusal is None]
        if not usable:
            listed = len(self._catalogue.names)
            why = f"no name of the {listed} is in Permissions.allow" if listed else "the server lists none"
            # The first that the allowlist admits stands for all.
            _log.warning("no tool may be called: %s", surveyed[0][1] if surveyed else why)
        await self._catalogue.remember(*usable)
        return [entry.contract for entry in usable]

    async def survey(self, *, deadline_s: float = LISTING_DEADLINE_S) -> list[Surveyed]:
        """List every tool, and why it would be refused. For an operator: nothing is pinned.

        Raises:
            RemoteToolError: the server did not list them.
        """
        surveyed = await self._surveyed(lambda _: True, deadline_s)
        return [Surveyed(entry.contract, refusal) for entry, refusal in surveyed]

    async def _surveyed(
        self, wanted: Callable[[str], bool], deadline_s: float
    ) -> list[tuple[CatalogueEntry, RemoteToolError | None]]:
        entries = await self._by(_ends_at(deadline_s), lambda: self._catalogue.entries(wanted))
        return [(entry, self._admission.refusal(entry)) for entry in entries]

    async def accept(self, name: str, *, deadline_s: float = LISTING_DEADLINE_S) -> ToolContract:
        """Pin the tool ``name`` as the server lists it now.

        Raises:
            RemoteToolError: the server did not list it.
        """
        self._catalogue.stale()
        entry = await self._entry(name, _ends_at(deadline_s))
        await self._catalogue.accept(entry)
        return entry.contract

    async def execute(  # noqa: PLR0913 - what a caller may state of a call
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        deadline_s: float | None = None,
        correlation_id: str | None = None,
        traceparent: str | None = None,
        on_progress: ProgressFnT | None = None,
    ) -> ToolResult:
        """Call the tool ``name``.

        ``deadline_s`` shortens the contract's; ``correlation_id`` and ``traceparent`` are made if they are
        absent. A malformed ``traceparent`` is replaced, as W3C Trace Context asks for.

        Raises:
            RemoteToolError: the call was refused or has failed.
            AuditFailedError: it could not be recorded.
            PinsError, OSError: the file of pins cannot be used.
        """
        arguments = {} if arguments is None else arguments
        is_id = isinstance(correlation_id, str) and GIVEN_ID.fullmatch(correlation_id)
        own_id = correlation_id if is_id else None
        call = RemoteCall(own_id or self._ulids.new(), str(name), arguments, self._traceparent(traceparent))
        began_at, began_s = asyncio.get_running_loop().time(), self._environment.monotonic()
        try:
            if correlation_id is not None and not is_id:
                raise ToolInvalidArguments(
                    "The correlation id is malformed.",
                    reason=Reason.CORRELATION_ID,
                    suggested_fix="Give 1 to 64 letters, digits and ._- as correlation_id, or none.",
                )
            _check_deadline(deadline_s)
            self._admission.permissions.check_name(name)  # before the server is even connected
            longest_s = self._terms.deadline_s_of(name)
            deadline_at = began_at + (longest_s if deadline_s is None else min(deadline_s, longest_s))
            entry = await self._entry(name, deadline_at)
            await self._admission.check_call(entry, arguments, deadline_at)
            fault = await self._by(deadline_at, lambda: self._catalogue.check_named(entry, arguments))
            if fault is not None:
                raise unverified(fault)
            await self._catalogue.remember(entry)
            self._admission.check_pin(entry)  # another process may have pinned it first, as something else
        except (RemoteToolError, PinsError, OSError, asyncio.CancelledError) as error:
            self._record_unsent(call, self._ms_since(began_s), error)
            raise
        call.risk = entry.contract.risk
        return await self._repeated(call, entry, deadline_at, on_progress)

    def _record_unsent(self, call: RemoteCall, took_ms: float, error: BaseException) -> None:
        """Record that ``call`` ended before anything of it was sent: refused, or not, by ``error``."""
        if isinstance(error, RemoteToolError):
            error.correlation_id = call.correlation_id
            if error.reason in REFUSALS:
                self._audit.refused(call, took_ms, error.reason)
            else:
                self._audit.ended(call, 0, took_ms, error.reason, error.code, error.remote_correlation_id)
        elif isinstance(error, asyncio.CancelledError):
            self._audit.ended(call, 0, took_ms, Reason.CANCELLED)
        else:
            self._audit.refused(call, took_ms, Reason.PIN)

    async def _entry(self, name: str, deadline_at: float) -> CatalogueEntry:
        known = self._catalogue.known(name, self._environment.now_ms())
        if known is None:
            known = await self._by(deadline_at, lambda: self._catalogue.entry(name))
        if known is None:
            raise ToolNotFound(
                f"The server lists no tool {printable(name, 128)}{nearest(name, self._catalogue.names)}.",
                reason=Reason.UNLISTED,
                suggested_fix="List the tools and use a name from that list.",
            )
        return known

    async def _by(self, deadline_at: float, listing: Callable[[], Coroutine[Any, Any, ResultT]]) -> ResultT:
        wire = WireAttempt(ends_at=deadline_at + LEFT_OPEN_S)
        try:
            async with _operation(wire), asyncio.timeout_at(deadline_at):
                try:
                    return await self._left_at_the_end(listing())
                except MCPError as error:
                    if not self._connection.has_ended(wire, error):
                        raise
                return await self._left_at_the_end(listing())
        except TimeoutError:
            raise ToolTimeout(
                "The server did not list its tools within the deadline.",
                reason=Reason.DEADLINE,
                suggested_fix="Check that the server is running, or allow more time.",
                retryable=True,
            ) from None
        except NotConnectedError as error:
            raise self._failures.of_connecting(error) from error
        except MCPError as error:
            raise self._failures.of_listing(error, wire) from None
        except ValidationError:
            raise of_garbage() from None
        except ListingError as error:
            raise ToolProviderFailure(
                str(error), reason=Reason.TOO_LARGE, suggested_fix="Use a server that lists fewer tools."
            ) from None

    async def _left_at_the_end(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Return what ``work`` does. A caller that is cancelled cancels it, and does not wait for its end.

        The SDK tells the server of each request that is given up, and waits up to 5 s to be able to.
        """
        task = asyncio.create_task(work)
        self._left.add(task)
        task.add_done_callback(self._ended)
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            task.cancel()
            raise
        return task.result()

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._left.discard(task)
        if not task.cancelled():
            task.exception()  # else asyncio reports it, where its caller was cancelled

    def _traceparent(self, given: str | None) -> str:
        if given is not None and _TRACEPARENT.fullmatch(given):
            return given
        random_bytes = self._environment.random_bytes
        return f"00-{random_bytes(16).hex()}-{random_bytes(8).hex()}-01"

    def _ms_since(self, began_s: float) -> float:
        return (self._environment.monotonic() - began_s) * 1000

    # --- after every check has passed

    async def _repeated(
        self,
        call: RemoteCall,
        entry: CatalogueEntry,
        deadline_at: float,
        on_progress: ProgressFnT | None,
    ) -> ToolResult:
        """Make ``call``, and repeat it if it may be: if its tool is idempotent, depending on the error."""
        attempts = self._retries.attempts if entry.contract.idempotent else 1
        meta = {META_CORRELATION_ID: call.correlation_id, META_TRACEPARENT: call.traceparent}
        if attempts > 1:
            meta[META_IDEMPOTENCY_KEY] = self._ulids.new()
        backoff = self._retries.backoff(self._environment.chance)
        attempt, may_have_run = 1, False
        while True:
            try:
                return await self._attempt(call, entry, deadline_at, meta, on_progress, attempt)
            except RemoteToolError as error:
                error.correlation_id = call.correlation_id
                # The attempts of one call, together: what a later one did not reach, an earlier one may have.
                error.may_have_run = may_have_run = may_have_run or error.may_have_run
                if attempt >= attempts or not error.retryable:
                    raise
                # A server's own delay is a minimum; the jitter on top keeps callers from returning at once.
                delay_s = (error.retry_after_ms or 0) / 1000 + backoff.next_s()
                if asyncio.get_running_loop().time() + delay_s >= deadline_at:
                    raise
            await self._environment.sleep(delay_s)
            attempt += 1

    async def _attempt(  # noqa: PLR0913, PLR0917 - what one call is
        self,
        call: RemoteCall,
        entry: CatalogueEntry,
        deadline_at: float,
        meta: Mapping[str, str],
        on_progress: ProgressFnT | None,
        attempt: int,
    ) -> ToolResult:
        self._audit.started(call, attempt)
        began_s = self._environment.monotonic()
        known_as: str | None = None
        try:
            result = await self._sent(call, entry, deadline_at, meta, on_progress)
            known_as = remote_id(result)
            await self._check_result(result, entry, deadline_at)
        except Exception as error:
            failure = error if isinstance(error, RemoteToolError) else of_unexpected(error)
            failure.remote_correlation_id = known_as = failure.remote_correlation_id or known_as
            took_ms = self._ms_since(began_s)
            self._audit.ended(call, attempt, took_ms, failure.reason, failure.code, known_as)
            if failure is error:
                raise
            raise failure from error
        except asyncio.CancelledError:
            self._audit.ended(call, attempt, self._ms_since(began_s), Reason.CANCELLED)
            raise
        structured = result.structured_content
        self._audit.ended(call, attempt, self._ms_since(began_s), remote_id=known_as, result=structured)
        return ToolResult(structured, tuple(result.content), call.correlation_id, attempt, known_as)

    async def _sent(
        self,
        call: RemoteCall,
        entry: CatalogueEntry,
        deadline_at: float,
        meta: Mapping[str, str],
        on_progress: ProgressFnT | None,
    ) -> CallToolResult:
        idempotent, connected = entry.contract.idempotent, False
        wire = WireAttempt(
            headers={HEADER_CORRELATION_ID: call.correlation_id, HEADER_TRACEPARENT: call.traceparent},
            may_repeat=idempotent,
            ends_at=deadline_at + LEFT_OPEN_S,
        )
        try:
            async with asyncio.timeout_at(deadline_at):
                session = await self._connection.session()
                async with _operation(WireAttempt(ends_at=wire.ends_at)):
                    is_unchanged = await self._catalogue.is_unchanged(entry)
                if not is_unchanged:
                    raise ToolProviderFailure(
                        "The tool changed after the call was checked; it was not sent.",
                        reason=Reason.CONTRACT,
                        suggested_fix="Call again: the call is checked against the tool as it is now.",
                    )
                connected = True
                return await self._left_at_the_end(_send(session, call, meta, wire, on_progress))
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

    async def _check_result(self, result: CallToolResult, entry: CatalogueEntry, deadline_at: float) -> None:
        """Return if ``result`` is one that fits its schema, of nodes that are verified."""
        contract, structured = entry.contract, result.structured_content
        if result.is_error:
            raise self._failures.of_result(result, contract.name, idempotent=contract.idempotent)
        fault: str | None = None
        if entry.result is not None:
            fault = "it has no structured content"
            if structured is not None:
                fault = await self._checks.fault(entry.result, structured, deadline_at)
        elif as_json(structured) is None:
            fault = "it is not JSON"
        if fault is not None:
            what = "is not valid" if entry.result is None else "does not fit the output schema of the tool"
            raise ToolProviderFailure(
                f"The result {what}: {fault}.",
                reason=Reason.RESULT,
                suggested_fix="Report this to the operator of the server.",
                may_have_run=True,
            )
        try:
            wire = WireAttempt(ends_at=deadline_at + LEFT_OPEN_S)
            async with asyncio.timeout_at(deadline_at), _operation(wire):
                fault = await self._left_at_the_end(self._catalogue.check_answered(entry, structured))
        except TimeoutError:
            fault = "its manifest could not be verified within the deadline"
        except NotConnectedError:
            fault = "the server was not reached again for its manifest"
        if fault is not None:
            raise unverified(fault, may_have_run=True)


async def _send(
    session: ClientSession, call: RemoteCall, meta: Any, wire: WireAttempt, on_progress: ProgressFnT | None
) -> CallToolResult:
    # Not ``call_tool``: it validates by a library that can be made slow, and may list the tools in between.
    request = CallToolRequest(
        params=CallToolRequestParams(name=call.tool, arguments=dict(call.arguments), _meta=meta)
    )
    async with _operation(wire):
        return await session.send_request(request, CallToolResult, progress_callback=on_progress)


@asynccontextmanager
async def _operation(wire: WireAttempt) -> AsyncIterator[None]:
    """Let the requests of the block be those of ``wire``: a call, or what is read of a server for one."""
    token = ATTEMPT.set(wire)
    try:
        yield
    finally:
        ATTEMPT.reset(token)


def _ends_at(deadline_s: float) -> float:
    """Return the time of the event loop at which a listing ends that may take ``deadline_s`` from now."""
    _check_deadline(deadline_s)
    return asyncio.get_running_loop().time() + deadline_s


def _check_deadline(deadline_s: float | None) -> None:
    if not is_deadline(deadline_s):
        raise ToolInvalidArguments(
            "The deadline is negative or not a number.",
            reason=Reason.ARGUMENTS,
            suggested_fix="Give the seconds that the call may take as deadline_s, or none.",
        )
