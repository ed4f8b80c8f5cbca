"""The manifest's rules with the kinds that an operator named: the local amendment of RFC-0001, section 2.

An entry of the enum of kinds, the verbs that are their own, and a clamp for each. Must not change what is
served: the document keeps its bytes, and its meaning for those who read it elsewhere.
"""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from schemas.kinds import NamedKind


def amended(manifest: dict[str, Any], named: Sequence[NamedKind]) -> dict[str, Any]:
    """Return the document ``manifest`` with rules that admit the kinds ``named`` too."""
    rules = deepcopy(manifest)
    capability = rules["$defs"]["Capability"]
    capability["properties"]["kind"]["enum"] += [each.kind.name for each in named]
    verbs = capability["properties"]["verbs"]["items"]["enum"]
    verbs += sorted({verb for each in named for verb in each.kind.verbs} - {*verbs})
    capability["allOf"] += [_clamp(each) for each in named]
    return rules


def _clamp(named: NamedKind) -> dict[str, Any]:
    kind = named.kind
    return {
        "if": {"properties": {"kind": {"const": kind.name}}},
        "then": {
            "properties": {
                "safety_class": {"const": kind.safety_class},
                "verbs": {"items": {"enum": sorted(kind.verbs)}},
                "constraints": {
                    "properties": {
                        "deadline_ms_default": {"maximum": named.most_deadline_ms},
                        "rate_limit_rps": {"maximum": named.most_rate_rps},
                    }
                },
            }
        },
    }
