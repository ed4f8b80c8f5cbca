"""The table of fuzz targets: one for every parser of bytes that come from outside of a process.

A target's docstring states what must hold of every input. Whatever a target raises is a finding.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from tests.fuzz import answers, documents, files, identities, live_node, live_relay, names, streams
from tests.fuzz.target import Target

TARGETS: Final[Mapping[str, Target]] = MappingProxyType(
    {
        **documents.TARGETS,
        **identities.TARGETS,
        **names.TARGETS,
        **streams.TARGETS,
        **answers.TARGETS,
        **files.TARGETS,
        **live_relay.TARGETS,
        **live_node.TARGETS,
    }
)
"""By name, as ``python -P -m tests.fuzz`` takes it."""
