"""An audit as a relay leaves it, in as many files as a test wants, and what an intruder does to it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from relay.audit.log import AuditLog, AuditUnavailableError, NewLine
from relay.observability.ascii_json import members_of
from tests.fakes.clock import FakeClock
from tests.fakes.signer import NOW_MS

_LOOK_MS = 1000


class LineLog(AuditLog):
    """An audit that a test writes line by line, where a relay's writer appends several at once."""

    def write(self, **facts: Any) -> None:
        if not self.append_all([NewLine(self._now_ms(), members_of(facts))]):
            raise AuditUnavailableError


class WrittenAudit:
    """Lines numbered from 1, a second apart; ``rotate`` has the next one begin a new file."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "audit.jsonl"
        self.clock = FakeClock(NOW_MS)
        self._log = LineLog(self.path, self.clock, max_bytes=1)
        self._written = 0

    def write(self, lines: int = 1) -> str:
        """Write ``lines`` into the file that is open, and return the hash of the last."""
        for _ in range(lines):
            self._written += 1
            self._log.write(number=self._written)
        return self._log.head

    def write_facts(self, **facts: Any) -> None:
        self._log.write(**facts)

    def rotate(self) -> None:
        """Let the next line begin a new file."""
        self.clock.advance(_LOOK_MS)

    def close(self) -> None:
        self._log.close()

    @property
    def files(self) -> list[Path]:
        """Every file, oldest first."""
        return [*sorted(self.path.parent.glob("audit-*.jsonl")), self.path]

    def change(self, change: Callable[[list[bytes]], object], file: int = -1) -> None:
        """Let ``change`` alter the list of lines of one file, in place."""
        path = self.files[file]
        lines = path.read_bytes().splitlines()
        change(lines)
        path.write_bytes(b"".join(line + b"\n" for line in lines))
