"""The limits of callers' sessions that the relay alone keeps; those of both ends are in the contract.

Must not hold what a node needs to know: the two ends would differ.
"""

from dataclasses import dataclass

from schemas.caller_tools import NODE_MARGIN_S

MAX_WAIT_MS = 60_000
"""The longest long poll: longer waits are cut off by clients and proxies."""
MAX_RESULT_BYTES = 256 * 1024
"""The events of one answer; one event always fits."""
MAX_EVENTS = 512
"""The events that one session keeps, besides the requests that are pending."""
MAX_TOKENS = 32
"""The tokens that are noted for one session, those that expire last."""
MAX_SESSIONS = 4096
"""The live sessions of all nodes."""
GRACE_S = 2.0
"""How soon a caller that has closed a request before its response has to make another one."""
MAX_POLLS = 64
"""The long polls that one agent has open."""
NODE_BYTES = 32 << 20
TOTAL_BYTES = 256 << 20


@dataclass(slots=True)
class Timeouts:
    """How long things last, in seconds. They may be changed.

    Attributes:
        request: how long a request waits for the caller's answer.
        unreachable: how long one that is not delivered waits for a caller that cannot be reached.
        idle: how long a session lasts without use by either end.
    """

    request: float = 60.0
    unreachable: float = 10.0
    idle: float = 1800.0

    @property
    def kept(self) -> float:
        """How long a request that has ended is known, with its answer.

        A node that resumes its session asks again for as long as it waits, and such a request must not reach
        the caller a second time.
        """
        return self.request + 2 * NODE_MARGIN_S
