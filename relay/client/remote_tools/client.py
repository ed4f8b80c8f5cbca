"""``RemoteTools``: what an agent runtime puts in front of an MCP server.

No call leaves unvalidated, unpermitted, uncorrelated or unaudited: ``execute`` checks in a fixed order, and
sends nothing of a call before every check has passed. Must not keep arguments or results.
"""

import asyncio
import logging
import os
import random
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from mcp.shared.dispatcher import ProgressFnT
from mcp.shared.exceptions import MCPError
from pydantic import ValidationError

from relay.client.remote_tools.admission import Admission, unverified
from relay.client.remote_tools.audit import AuditSink, CallAudit, JsonLines, Recorded
from relay.client.remote_tools.catalogue import Catalogue, CatalogueEntry, ListingError
from relay.client.remote_tools.check_process import CheckProcess
from relay.client.remote_tools.connection import NotConnectedError, ServerConnection
from relay.client.remote_tools.contracts import ContractTerms, ToolContract, ToolRule, is_deadline
from relay.client.remote_tools.errors import (
    REFUSALS,
    Reason,
    RemoteToolError,
    ToolInvalidArguments,
    ToolNotFound,
    ToolProviderFailure,
    ToolTimeout,
)
from relay.client.remote_tools.execution import Execution, RemoteCall, ToolResult
from relay.client.remote_tools.failures import FailureTable, of_garbage
from relay.client.remote_tools.http_client import ATTEMPT, WireAttempt
from relay.client.remote_tools.manifests import ManifestVerifier
from relay.client.remote_tools.permissions import Budget, Meter, Permissions
from relay.client.remote_tools.pins import Pins, PinsError
from relay.client.remote_tools.redaction import Redaction
from relay.client.remote_tools.retries import RetryPolicy
from relay.client.remote_tools.servers import HttpServer, Server
from schemas.text import printable
from schemas.ulids import GIVEN_ID, UlidSource
from schemas.unknown_names import nearest

LISTING_DEADLINE_S = 30.0
FOLLOWING = RetryPolicy(first_delay_s=1, longest_delay_s=60)
"""When a subscription to changes is made again that has ended."""

ResultT = TypeVar("ResultT")

_log = logging.getLogger(__name__)
_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(frozen=True, slots=True)
class ClientEnvironment:
    """Time, randomness and waiting, which a test replaces."""

    now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
    monotonic: Callable[[], float] = time.monotonic
    random_bytes: Callable[[int], bytes] = os.urandom
    chance: Callable[[], float] = random.random
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


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
        environment = environment or ClientEnvironment()
        server = HttpServer(server) if isinstance(server, str) else server
        self._environment = environment
        self._ulids = UlidSource(environment.now_ms, environment.random_bytes)
        sink = JsonLines(audit, environment.monotonic) if isinstance(audit, Path) else audit
        self._file = sink if isinstance(sink, JsonLines) else None
        self._audit = CallAudit(sink, redaction, environment.now_ms)
        for_texts = redaction or Redaction()
        self._failures = FailureTable(for_texts)
        self._connection = ServerConnection(
            server,
            self._on_change,
            for_texts,
            lambda failed: FOLLOWING.delay_s(failed, None, environment.chance),
            environment.sleep,
            mode,
        )
        self._catalogue = Catalogue(
            self._connection,
            ContractTerms(rules, trust_annotations=trust_annotations, deadline_s=deadline_s),
            Pins(pins, server.name) if pins is not None else None,
            ManifestVerifier(verify_manifests, environment.now_ms, kinds) if verify_manifests else None,
            environment.monotonic,
        )
        meter = Meter(budget or Budget(), environment.monotonic)
        self._checks = CheckProcess()
        self._admission = Admission(permissions or Permissions(), meter, self._catalogue, self._checks)
        self._execution = Execution(
            connection=self._connection,
            checks=self._checks,
            audit=self._audit,
            failures=self._failures,
            retries=retries or RetryPolicy(),
            is_unchanged=self._catalogue.is_unchanged,
            check_answered=self._catalogue.check_answered,
            new_id=self._ulids.new,
            monotonic=environment.monotonic,
            chance=environment.chance,
            sleep=environment.sleep,
        )

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
        if self._file is not None:
            self._file.close()

    async def list_tools(self, *, deadline_s: float = LISTING_DEADLINE_S) -> list[ToolContract]:
        """List the tools that may be called, and pin those that are new: what a model may be shown.

        Raises:
            RemoteToolError: the server did not list them.
        """
        entries = await self._within(deadline_s, lambda: self._catalogue.entries(self._admission.admits_name))
        refusals = [(entry, self._admission.refusal(entry)) for entry in entries]
        usable = [entry for entry, refusal in refusals if refusal is None]
        if not usable:
            self._say_why(next((refusal for _, refusal in refusals if refusal is not None), None))
        self._catalogue.remember(*usable)
        return [entry.contract for entry in usable]

    def _say_why(self, refusal: RemoteToolError | None) -> None:
        """Log why no tool is listed; ``refusal`` is of the first that the allowlist admits."""
        listed = len(self._catalogue.names)
        why = "the server lists none" if not listed else f"no name of the {listed} is in Permissions.allow"
        _log.warning("no tool may be called: %s", why if refusal is None else refusal)

    async def survey(self, *, deadline_s: float = LISTING_DEADLINE_S) -> list[Surveyed]:
        """List every tool, and why it would be refused. For an operator: nothing is pinned.

        Raises:
            RemoteToolError: the server did not list them.
        """
        entries = await self._within(deadline_s, lambda: self._catalogue.entries(lambda _: True))
        return [Surveyed(entry.contract, self._admission.refusal(entry)) for entry in entries]

    async def accept(self, name: str, *, deadline_s: float = LISTING_DEADLINE_S) -> ToolContract:
        """Pin the tool ``name`` as the server lists it now.

        Raises:
            RemoteToolError: the server did not list it.
        """
        self._catalogue.stale()
        entry = await self._entry(name, deadline_s)
        self._catalogue.accept(entry)
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
        is_malformed = correlation_id is not None and not _is_id(correlation_id)
        if correlation_id is None or is_malformed:
            correlation_id = self._ulids.new()
        traceparent = self._traceparent(traceparent)
        began_at = asyncio.get_running_loop().time()
        began_s = self._environment.monotonic()
        try:
            if is_malformed:
                raise _malformed_id()
            _check_deadline(deadline_s)
            self._admission.check_name(name)
            entry = await self._entry(name, deadline_s)
            longest_s = entry.contract.deadline_s
            deadline_at = began_at + (longest_s if deadline_s is None else min(deadline_s, longest_s))
            await self._admission.check_call(entry, arguments, deadline_at)
            limit_s = LISTING_DEADLINE_S if deadline_s is None else deadline_s
            fault = await self._within(limit_s, lambda: self._catalogue.check_named(entry, arguments))
            if fault is not None:
                raise unverified(fault)
            self._catalogue.remember(entry)
        except (RemoteToolError, PinsError, OSError, asyncio.CancelledError) as error:
            took_ms = (self._environment.monotonic() - began_s) * 1000
            recorded = Recorded(correlation_id, str(name), traceparent=traceparent)
            self._record_unsent(recorded, took_ms, error, arguments)
            raise
        call = RemoteCall(
            name,
            arguments,
            correlation_id,
            traceparent,
            deadline_at,
            on_progress,
        )
        return await self._execution.run(call, entry)

    def _record_unsent(self, call: Recorded, took_ms: float, error: BaseException, arguments: object) -> None:
        """Record that ``call`` ended before anything of it was sent: refused, or not, by ``error``."""
        if not isinstance(error, RemoteToolError):
            if isinstance(error, asyncio.CancelledError):
                self._audit.ended(call, 0, took_ms, Reason.CANCELLED)
            else:
                self._audit.refused(call, took_ms, Reason.PIN, arguments)
            return
        error.correlation_id = call.correlation_id
        if error.reason in REFUSALS:
            self._audit.refused(call, took_ms, error.reason, arguments)
        else:
            self._audit.ended(call, 0, took_ms, error.reason, error.code, error.remote_correlation_id)

    async def _entry(self, name: str, deadline_s: float | None) -> CatalogueEntry:
        known = self._catalogue.known(name, self._environment.now_ms())
        if known is None:
            limit_s = LISTING_DEADLINE_S if deadline_s is None else deadline_s
            known = await self._within(limit_s, lambda: self._catalogue.entry(name))
        if known is None:
            raise _not_listed(name, self._catalogue.names)
        return known

    async def _within(self, deadline_s: float, listing: Callable[[], Awaitable[ResultT]]) -> ResultT:
        _check_deadline(deadline_s)
        wire = WireAttempt()
        token = ATTEMPT.set(wire)
        try:
            async with asyncio.timeout(deadline_s):
                try:
                    return await listing()
                except MCPError as error:
                    if not self._connection.has_ended(wire, error):
                        raise
                return await listing()
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
            failure = self._failures.of_jsonrpc(error, wire, idempotent=True)
            failure.may_have_run = False
            raise failure from None
        except ValidationError:
            raise of_garbage() from None
        except ListingError as error:
            raise ToolProviderFailure(
                str(error), reason=Reason.TOO_LARGE, suggested_fix="Use a server that lists fewer tools."
            ) from None
        finally:
            ATTEMPT.reset(token)

    def _traceparent(self, given: str | None) -> str:
        if given is not None and _TRACEPARENT.fullmatch(given):
            return given
        random_bytes = self._environment.random_bytes
        return f"00-{random_bytes(16).hex()}-{random_bytes(8).hex()}-01"

    def _on_change(self) -> None:
        self._catalogue.stale()


def _is_id(value: object) -> bool:
    return isinstance(value, str) and GIVEN_ID.fullmatch(value) is not None


def _malformed_id() -> ToolInvalidArguments:
    return ToolInvalidArguments(
        "The correlation id is malformed.",
        reason=Reason.CORRELATION_ID,
        suggested_fix="Give 1 to 64 letters, digits and ._- as correlation_id, or none.",
    )


def _check_deadline(deadline_s: float | None) -> None:
    if not is_deadline(deadline_s):
        raise ToolInvalidArguments(
            "The deadline is negative or not a number.",
            reason=Reason.ARGUMENTS,
            suggested_fix="Give the seconds that the call may take as deadline_s, or none.",
        )


def _not_listed(name: str, listed: Iterable[str]) -> ToolNotFound:
    return ToolNotFound(
        f"The server lists no tool {printable(name, 128)}{nearest(name, listed)}.",
        reason=Reason.UNLISTED,
        suggested_fix="List the tools and use a name from that list.",
    )
