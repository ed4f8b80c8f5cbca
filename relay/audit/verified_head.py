"""The head of the audit as it was last verified, kept beside it: what was there then must still be there.

It shows that lines were cut off, or a file lost, since the last verification on this machine. Who can write
the audit can write this too: against that helps only a head noted elsewhere. Must not judge the audit.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from relay.audit.chain import GENESIS
from schemas.files import read_state, write_atomic

_MAX_BYTES = 1024


@dataclass(frozen=True, slots=True)
class VerifiedHead:
    """The hash of the line that was the newest, and when that was."""

    head: str
    verified_at_ms: int


def read_verified_head(path: Path) -> VerifiedHead | None:
    """Return what was kept in ``path``; None if nothing was verified yet.

    Raises:
        OSError: it cannot be read, or is damaged.
    """
    try:
        data = read_state(path, _MAX_BYTES)
    except FileNotFoundError:
        return None
    try:
        facts = json.loads(data)
        return VerifiedHead(str(facts["head"]), int(facts["verified_at_ms"]))
    except (ValueError, KeyError, TypeError):
        raise OSError(f"{path} is damaged: look whether lines are missing, then remove it") from None


def keep_verified_head(path: Path, head: str, now_ms: int) -> None:
    """Keep ``head`` in ``path``.

    Raises:
        OSError: it cannot be written.
    """
    if head != GENESIS:  # of an audit without a line there is nothing that could be missing later
        write_atomic(path, json.dumps(asdict(VerifiedHead(head, now_ms))) + "\n")
