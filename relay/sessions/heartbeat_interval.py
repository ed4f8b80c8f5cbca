"""How often a relay asks its nodes to heartbeat: less often the more nodes the fleet has.

Each heartbeat brings a signed manifest, which every relay of the fleet verifies, so its cost grows with the
fleet and not with the nodes of one relay. Must not know sessions.
"""

SHORTEST_MS = 60_000
LONGEST_MS = 300_000
_FEW, _MANY = 10_000, 100_000
_STEP_MS = 1000


def heartbeat_interval_ms(nodes: int) -> int:
    """Return the interval for a fleet of so many ``nodes``, in ms: 60 s up to 10 000, 300 s from 100 000 on.

    In between it grows evenly, in whole seconds.
    """
    share = min(max((nodes - _FEW) / (_MANY - _FEW), 0.0), 1.0)
    grown = SHORTEST_MS + share * (LONGEST_MS - SHORTEST_MS)
    return int(grown // _STEP_MS) * _STEP_MS
