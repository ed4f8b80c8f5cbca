"""The time of the newest manifest, in a file that is never behind what was published.

The file is written ahead: it reserves the next ten seconds, so that manifests signed within them need no
write of their own. A relay that makes a node sign again and again must not wear out its flash. A restarted
node continues after the reserved time. Must not decide what time a manifest gets.
"""

from collections.abc import Callable
from pathlib import Path

from structlog.typing import FilteringBoundLogger

from schemas.files import read_state, write_atomic
from schemas.text import printable

RESERVED_MS = 10_000


def read_last_issued_ms(file: Path) -> int:
    """Return the time in ``file``; 0 if there is none, or it cannot be read as one."""
    try:
        text = read_state(file)
        # Without its end a line is torn: the rest of a number is another number.
        return int(text) if text.endswith(b"\n") else 0
    except (FileNotFoundError, ValueError):
        return 0


class LastIssued:
    """The newest ``issued_at_ms``, kept in ``file``, or in memory alone for a node without disk.

    A file that cannot be written does not stop the node: after a restart, the relay sends its mark.

    Attributes:
        ms: the newest time; 0 before the first. What a file holds beyond ``greatest_ms`` counts as nothing.
    """

    def __init__(
        self, file: Path | None, greatest_ms: int, ticks_ms: Callable[[], int], log: FilteringBoundLogger
    ) -> None:
        self._file = file
        self._ticks_ms = ticks_ms
        self._log = log
        self._written_ticks: int | None = None
        self.ms = self._read(greatest_ms)
        self._reserved_ms = self.ms

    def wait_ms(self, issued_at_ms: int) -> int:
        """Return how long to wait before a manifest may have this time: two writes are 10 s apart."""
        if self._file is None or issued_at_ms <= self._reserved_ms or self._written_ticks is None:
            return 0
        return max(0, self._written_ticks + RESERVED_MS - self._ticks_ms())

    def advance(self, issued_at_ms: int, now_ms: int) -> None:
        """Record the time of a manifest, before it is published."""
        self.ms = issued_at_ms
        if issued_at_ms <= self._reserved_ms:
            return
        # From the clock and not from the manifest: a node that restarts every few seconds would otherwise
        # move ahead of its clock by the whole reserve each time.
        self._reserved_ms = max(issued_at_ms, now_ms + RESERVED_MS)
        self._write(self._reserved_ms)

    def replace(self, issued_at_ms: int) -> None:
        """Go on behind another time; where it is an earlier one, what was reserved is void."""
        self._reserved_ms = self._reserved_ms if issued_at_ms >= self.ms else issued_at_ms
        self.ms = issued_at_ms

    def _read(self, greatest_ms: int) -> int:
        read = 0 if self._file is None else read_last_issued_ms(self._file)
        return read if 0 <= read <= greatest_ms else 0

    def _write(self, issued_at_ms: int) -> None:
        if self._file is None:
            return
        self._written_ticks = self._ticks_ms()
        try:
            write_atomic(self._file, f"{issued_at_ms}\n")
        except OSError as error:
            self._log.warning("the time of the newest manifest is not kept", reason=printable(str(error)))
