"""The checks that a call passes before anything of it is sent, in a fixed order.

Allowlist, risk, scopes, budget, pin, input schema: the first that fails refuses the call. Must not send.
"""

import json
from collections.abc import Mapping
from typing import Any

from relay.client.remote_tools.catalogue import Catalogue, CatalogueEntry
from relay.client.remote_tools.check_process import CheckProcess
from relay.client.remote_tools.errors import (
    Reason,
    RemoteToolError,
    ToolInvalidArguments,
    ToolProviderFailure,
    ToolUnauthorized,
)
from relay.client.remote_tools.permissions import Meter, Permissions
from schemas.text import printable

MAX_ARGUMENTS_BYTES = 1024 * 1024

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


class Admission:
    """The checks of one caller. A tool's own faults count before its risk, which depends on them."""

    def __init__(
        self, permissions: Permissions, meter: Meter, catalogue: Catalogue, checks: CheckProcess
    ) -> None:
        self._permissions = permissions
        self._meter = meter
        self._catalogue = catalogue
        self._checks = checks

    def check_name(self, name: str) -> None:
        """Return if the allowlist admits ``name``: before the server is even connected.

        Raises:
            ToolUnauthorized: it does not.
        """
        self._permissions.check_name(name)

    def admits_name(self, name: str) -> bool:
        """Return whether the allowlist admits ``name``."""
        return self._permissions.admits(name)

    async def check_call(
        self, entry: CatalogueEntry, arguments: Mapping[str, Any], deadline_at: float
    ) -> None:
        """Return if a call of ``entry`` with ``arguments``, whose name was checked, passes every other check.

        ``deadline_at`` is a time of the event loop.

        Raises:
            RemoteToolError: it does not.
        """
        _check_verified(entry)
        self._permissions.check(entry.contract)
        self._meter.take()
        self._check_pin(entry)
        await self._check_arguments(entry, arguments, deadline_at)

    def refusal(self, entry: CatalogueEntry) -> RemoteToolError | None:
        """Return why a call of ``entry`` would be refused whatever its arguments; None if it would not."""
        try:
            self._permissions.check_name(entry.contract.name)
            _check_verified(entry)
            self._permissions.check(entry.contract)
            self._check_pin(entry)
            _check_usable(entry)
        except RemoteToolError as error:
            return error
        return None

    def _check_pin(self, entry: CatalogueEntry) -> None:
        if changes := self._catalogue.changes(entry):
            name = printable(entry.contract.name, 128)
            raise ToolUnauthorized(
                f"{name} is not what it was when it was pinned: {'; '.join(map(str, changes))}",
                reason=Reason.PIN,
                suggested_fix=f"Review the change, then run: relay tools --accept {name}",
            )

    async def _check_arguments(self, entry: CatalogueEntry, arguments: object, deadline_at: float) -> None:
        _check_usable(entry)
        fault: str | None
        try:
            # What JSON does not have must not reach the SDK, which would end the connection.
            size = len(_ENCODER.encode(arguments).encode())
        except (ValueError, TypeError, RecursionError):
            fault = "they are not JSON"
        else:
            fault = f"they have {size} bytes" if size > MAX_ARGUMENTS_BYTES else None
            if not isinstance(arguments, Mapping):
                fault = "they are not an object"
        if fault is None and entry.arguments is not None:
            fault = await self._checks.fault(entry.arguments, arguments, deadline_at, is_arguments=True)
        if fault is not None:
            raise ToolInvalidArguments(
                f"The arguments do not fit the input schema of the tool: {fault}.",
                reason=Reason.ARGUMENTS,
                suggested_fix="Read the input schema of the tool and send arguments that fit it.",
            )


def _check_verified(entry: CatalogueEntry) -> None:
    if entry.manifest_fault is not None:
        raise unverified(entry.manifest_fault)


def unverified(fault: str, *, may_have_run: bool = False) -> ToolUnauthorized:
    """Return the error of a tool or a node whose manifest is not verified."""
    return ToolUnauthorized(
        f"The tool is not verified: {fault}.",
        reason=Reason.MANIFEST,
        suggested_fix="Ask the operator of the node; call only tools whose manifest can be verified.",
        may_have_run=may_have_run,
    )


def _check_usable(entry: CatalogueEntry) -> None:
    if entry.schema_fault is not None:
        raise ToolProviderFailure(
            f"The tool cannot be called: {entry.schema_fault}.",
            reason=Reason.CONTRACT,
            suggested_fix="Report this to the operator of the server.",
        )
