"""The head of the audit at its last verification, kept beside it, so that lines lost since then are noticed.

It shows that lines were cut off, or a file lost, since the last verification on this machine. A process that
can write the audit can write this too: only a head kept elsewhere protects from that. Must not verify.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from relay.audit.chain import GENESIS
from schemas.error_roots import StateError
from schemas.files import read_state, write_atomic
from schemas.strict_json import StrictJsonError, loads

_MAX_BYTES = 1024


class VerifiedHeadError(StateError):
    """The kept head is damaged."""


@dataclass(frozen=True, slots=True)
class VerifiedHead:
    """The hash of the line that was the newest, and when that was."""

    head: str
    verified_at_ms: int


def read_verified_head(path: Path) -> VerifiedHead | None:
    """Return what was kept in ``path``; None if nothing was verified yet.

    Raises:
        VerifiedHeadError: it is damaged.
        OSError: it cannot be read.
    """
    try:
        data = read_state(path, _MAX_BYTES)
    except FileNotFoundError:
        return None
    try:
        facts = loads(data, max_bytes=_MAX_BYTES)
        return VerifiedHead(str(facts["head"]), int(facts["verified_at_ms"]))
    except (StrictJsonError, ValueError, KeyError, TypeError):
        raise VerifiedHeadError(
            f"{path} is damaged: look whether lines are missing, then remove it"
        ) from None


def keep_verified_head(path: Path, head: str, now_ms: int) -> None:
    """Keep ``head`` in ``path``.

    Raises:
        OSError: it cannot be written.
    """
    if head != GENESIS:  # an audit without a line can lose none
        write_atomic(path, json.dumps(asdict(VerifiedHead(head, now_ms))) + "\n")
