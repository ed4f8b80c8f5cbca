"""Whether a process logs to systemd's journal, and how a line tells the journal its priority.

The journal takes ``<N>`` in front of a line of standard error as its priority (sd-daemon(3)): a connection to
its socket is not needed. What the program is called is the unit's SyslogIdentifier. Must not write.
"""

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import TextIO

_PRIORITIES = MappingProxyType({"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2})


def is_journal(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Return whether ``stream`` is the one that systemd has connected to the journal (systemd.exec(5))."""
    try:
        facts = os.fstat(stream.fileno())
    except (OSError, ValueError):  # closed, or no file
        return False
    return environment.get("JOURNAL_STREAM") == f"{facts.st_dev}:{facts.st_ino}"


def with_priority(level: str, line: str) -> str:
    """Return ``line``, of ``level``, as the journal reads its priority."""
    return f"<{_PRIORITIES.get(level, _PRIORITIES['info'])}>{line}"
