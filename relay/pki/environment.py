"""What the parts that issue certificates have in common: the CA, the records of what they do, and the clock.

Must not contain state of a part.
"""

from collections.abc import Callable
from dataclasses import dataclass

from structlog.typing import FilteringBoundLogger

from relay.audit.log import AuditLog
from relay.audit.refusal_counts import RefusalCounter
from relay.pki.authority import CertificateAuthority


@dataclass(frozen=True, slots=True)
class PkiEnvironment:
    """What a part that issues certificates of ``ca`` gets.

    Attributes:
        audit: every certificate is in it before it is handed out.
        refusals: counts what is refused, and writes that to the audit.
        now_ms: the system's time in milliseconds since the epoch.
    """

    ca: CertificateAuthority
    audit: AuditLog
    refusals: RefusalCounter
    log: FilteringBoundLogger
    now_ms: Callable[[], int]
