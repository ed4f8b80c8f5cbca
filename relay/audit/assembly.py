"""Assembles the audit: the log of decisions and outcomes, and the counted refusals in it.

Must not decide anything: it constructs the parts and connects them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from relay.audit.log import AuditLog
from relay.audit.refusal_counts import RefusalCounter
from relay.part import Part
from relay.settings.environment import RelayEnvironment
from schemas.health import Health, Loop


@dataclass(frozen=True, slots=True)
class AuditPart(Part):
    """The audit of one relay."""

    log: AuditLog
    refusals: RefusalCounter

    async def run(self) -> None:
        await self.refusals.run()

    def loops(self) -> Mapping[str, Loop]:
        return {"refusals": self.refusals.loop}

    async def close(self) -> None:
        self.log.close()

    def health(self) -> Mapping[str, Health]:
        """Calls are refused while they cannot be recorded."""
        return {"audit": Health.passive(ready=self.log.available)}


def assemble(environment: RelayEnvironment) -> AuditPart:
    """Return the part.

    Raises:
        OSError: the log cannot be opened.
    """
    log = AuditLog(environment.config.state.audit, environment.now_ms)
    return AuditPart(log, RefusalCounter(log, environment.log, environment.monotonic, environment.ulids.new))
