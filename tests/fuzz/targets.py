"""The table of fuzz targets: one for every parser of bytes that come from outside of a process.

A target's docstring states what must hold of every input. Whatever a target raises is a finding.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from tests.fuzz import (
    answers,
    documents,
    enrolment,
    files,
    identities,
    ledger_entries,
    live_http,
    live_node,
    live_relay,
    local_sockets,
    names,
    neighbours,
    own_files,
    streams,
)
from tests.fuzz.target import Target

TARGETS: Final[Mapping[str, Target]] = MappingProxyType(
    {
        **documents.TARGETS,
        **identities.TARGETS,
        **names.TARGETS,
        **streams.TARGETS,
        **answers.TARGETS,
        **files.TARGETS,
        **enrolment.TARGETS,
        **ledger_entries.TARGETS,
        **neighbours.TARGETS,
        **own_files.TARGETS,
        **local_sockets.TARGETS,
        **live_http.TARGETS,
        **live_relay.TARGETS,
        **live_node.TARGETS,
    }
)
"""By name, as ``python -P -m tests.fuzz`` takes it."""
