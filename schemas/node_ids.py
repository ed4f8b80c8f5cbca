"""The id of a new node: a ULID in lower case (RFC-0001 section 2).

Must not be imported by a running node, which has its id: the library costs it 1.6 MiB.
"""

from collections.abc import Callable

from ulid import ULID

_TIME_BYTES = 6
_RANDOM_BYTES = 10


def new_node_id(now_ms: int, random_bytes: Callable[[int], bytes]) -> str:
    """Return the id of a node that is made at ``now_ms``."""
    made = ULID(now_ms.to_bytes(_TIME_BYTES, "big") + random_bytes(_RANDOM_BYTES))
    return str(made).lower()
