"""The local checks of a call: allowlist, risk ceiling, scopes, budget. Deny by default.

Must not read what the server claims, except through the contract.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from relay.client.remote_tools.contracts import Risk, ToolContract
from relay.client.remote_tools.errors import Reason, ToolUnauthorized
from schemas.text import printable
from schemas.token_bucket import TokenBucket


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
