"""The clock of one process, set by a test while it runs: libfaketime, which the process loads.

Ticks go on as they are. Must not be used while the broker is away: paho waits by a clock that libfaketime
cannot serve with ticks of its own, and its thread ends.
"""

from collections.abc import Sequence
from pathlib import Path

from tests.faults.site import not_made

_PATTERN = "*/faketime/libfaketime.so.1"


class FakedTime:
    """The clock of the processes whose commands begin with ``prefix``. ``file`` holds what it reads."""

    def __init__(self, file: Path) -> None:
        library = next(Path("/usr/lib").glob(_PATTERN), None)
        if library is None:
            not_made("not installed: libfaketime. Run: apt-get install --no-install-recommends libfaketime")
        self._file = file
        self.set("+0")
        self.prefix: Sequence[str] = (
            "env",
            f"LD_PRELOAD={library}",
            f"FAKETIME_TIMESTAMP_FILE={file}",
            "DONT_FAKE_MONOTONIC=1",
            "FAKETIME_NO_CACHE=1",
        )

    def set(self, time: str) -> None:
        """Set it: a step from the real time as ``+1d``, or a time as ``@1970-01-01 00:01:00``."""
        # In one step: the process may read at any moment.
        new = self._file.with_name(f"{self._file.name}.new")
        new.write_text(time, "ascii")
        new.replace(self._file)
