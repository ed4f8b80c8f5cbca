"""The checks that a call passes before anything of it is sent, in a fixed order. Deny by default.

Allowlist, risk, scopes, budget, pin, input schema: the first that fails refuses the call. Must not send, and
must not read what the server claims, except through the contract.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from shlex import quote
from typing import Any

from attrs import define

from relay.client.remote_tools.catalogue import Catalogue, CatalogueEntry
from relay.client.remote_tools.contracts import Risk, ToolContract
from relay.client.remote_tools.errors import (
    Reason,
    RemoteToolError,
    ToolInvalidArguments,
    ToolProviderFailure,
    ToolUnauthorized,
)
from relay.client.remote_tools.tool_schemas import CheckProcess
from schemas.pacing import TokenBucket
from schemas.text import printable

MAX_ARGUMENTS_BYTES = 1024 * 1024

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


@dataclass(frozen=True, slots=True)
class Permissions:
    """What may be called.

    Attributes:
        allow: globs over the names that are called; none matches nothing.
        max_risk: the ceiling.
        scopes: what the caller was granted: a tool that requires another is refused. None leaves that check
            to the server.
    """

    allow: tuple[str, ...] = ()
    max_risk: Risk = Risk.READ
    scopes: frozenset[str] | None = frozenset()

    def admits(self, name: object) -> bool:
        """Return whether the allowlist admits ``name``, which a model may have written: only a text."""
        return isinstance(name, str) and any(fnmatchcase(name, pattern) for pattern in self.allow)

    def check_name(self, name: object) -> None:
        """Return if the allowlist admits ``name``.

        Raises:
            ToolUnauthorized: it does not.
        """
        if not self.admits(name):
            raise ToolUnauthorized(
                f"{printable(str(name), 128)} is not on the allowlist.",
                reason=Reason.ALLOWLIST,
                suggested_fix="Ask the operator to add a pattern that matches the name to the allowlist.",
            )

    def check(self, contract: ToolContract) -> None:
        """Return if ceiling and scopes admit ``contract``.

        Raises:
            ToolUnauthorized: they do not.
        """
        if contract.risk.level > self.max_risk.level:
            raise ToolUnauthorized(
                f"The tool's risk is {contract.risk} (by {contract.risk_source}), above {self.max_risk}.",
                reason=Reason.RISK,
                suggested_fix="Have the risk lowered by a rule or a verified manifest, or raise the ceiling.",
            )
        if self.scopes is None:
            return
        if missing := contract.required_scopes - self.scopes:
            raise ToolUnauthorized(
                f"The tool requires the scope {', '.join(sorted(missing))}.",
                reason=Reason.SCOPE,
                suggested_fix="Grant the scope if the caller's credential has it.",
            )


@dataclass(frozen=True, slots=True)
class Budget:
    """How many calls may be made: in total, and per second with bursts of ``burst``. None is no limit."""

    calls: int | None = None
    rate: float | None = None
    burst: float = 1.0


class Meter:
    """Counts calls against a budget. Attempts of one call count once: the deadline bounds them."""

    def __init__(self, budget: Budget, monotonic: Callable[[], float]) -> None:
        self._left = budget.calls
        self._monotonic = monotonic
        self._bucket = TokenBucket(budget.rate, budget.burst, monotonic()) if budget.rate else None

    def take(self) -> None:
        """Take one call from the budget.

        Raises:
            ToolUnauthorized: it is spent; ``retryable`` with ``retry_after_ms`` if only the rate is.
        """
        if self._left == 0:
            raise ToolUnauthorized(
                "The budget of calls is spent.",
                reason=Reason.BUDGET,
                suggested_fix="Ask the operator for a larger budget.",
            )
        wait_s = self._bucket.take(self._monotonic()) if self._bucket else 0.0
        if wait_s:
            raise ToolUnauthorized(
                "The budget of calls per second is spent.",
                reason=Reason.BUDGET,
                suggested_fix="Wait for retry_after_ms, then call again.",
                retryable=True,
                retry_after_ms=max(1, round(wait_s * 1000)),
            )
        if self._left is not None:
            self._left -= 1


@define(eq=False, repr=False)
class Admission:
    """The checks of one caller. A tool's own faults count before its risk, which depends on them."""

    permissions: Permissions
    _meter: Meter
    _catalogue: Catalogue
    _checks: CheckProcess

    async def check_call(
        self, entry: CatalogueEntry, arguments: Mapping[str, Any], deadline_at: float
    ) -> None:
        """Return if a call of ``entry`` with ``arguments``, whose name was checked, passes every other check.

        ``deadline_at`` is a time of the event loop.

        Raises:
            RemoteToolError: it does not.
        """
        self._check_rights(entry)
        self._meter.take()
        self._check_contract(entry)
        fault = _fault_of(arguments)
        if fault is None and entry.arguments is not None:
            fault = await self._checks.fault(entry.arguments, arguments, deadline_at, is_arguments=True)
        if fault is not None:
            raise ToolInvalidArguments(
                f"The arguments do not fit the input schema of the tool: {fault}.",
                reason=Reason.ARGUMENTS,
                suggested_fix="Read the input schema of the tool and send arguments that fit it.",
            )

    def refusal(self, entry: CatalogueEntry) -> RemoteToolError | None:
        """Return why a call of ``entry`` would be refused whatever its arguments; None if it would not."""
        try:
            self.permissions.check_name(entry.contract.name)
            self._check_rights(entry)
            self._check_contract(entry)
        except RemoteToolError as error:
            return error
        return None

    def _check_rights(self, entry: CatalogueEntry) -> None:
        if entry.manifest_fault is not None:
            raise unverified(entry.manifest_fault)
        self.permissions.check(entry.contract)

    def _check_contract(self, entry: CatalogueEntry) -> None:
        self.check_pin(entry)
        if entry.schema_fault is not None:
            raise ToolProviderFailure(
                f"The tool cannot be called: {entry.schema_fault}.",
                reason=Reason.CONTRACT,
                suggested_fix="Report this to the operator of the server.",
            )

    def check_pin(self, entry: CatalogueEntry) -> None:
        """See that the tool is as it was pinned. Raises ToolUnauthorized."""
        if changes := self._catalogue.changes(entry):
            name = printable(entry.contract.name, 128)
            raise ToolUnauthorized(
                f"{name} is not what it was when it was pinned: {'; '.join(changes)}",
                reason=Reason.PIN,
                suggested_fix=f"Review the change, then run: relay tools --accept {quote(name)}",
            )


def _fault_of(arguments: object) -> str | None:
    """Return why ``arguments`` cannot be sent: what JSON does not have would end the SDK's connection."""
    try:
        size = len(_ENCODER.encode(arguments).encode())
    except (ValueError, TypeError, RecursionError):
        return "they are not JSON"
    if not isinstance(arguments, Mapping):
        return "they are not an object"
    return f"they have {size} bytes" if size > MAX_ARGUMENTS_BYTES else None


def unverified(fault: str, *, may_have_run: bool = False) -> ToolUnauthorized:
    """Return the error of a tool or a node whose manifest is not verified."""
    return ToolUnauthorized(
        f"The tool is not verified: {fault}.",
        reason=Reason.MANIFEST,
        suggested_fix="Ask the operator of the node; call only tools whose manifest can be verified.",
        may_have_run=may_have_run,
    )
