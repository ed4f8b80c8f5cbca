"""``python -P -m bench.quiet_relay ...``: ``relay``, which lets its nodes choose their heartbeats.

A relay requests one a minute. A fleet whose heartbeats come at a time that is known has seconds without any,
in which what an idle second costs can be measured, and then a minute's worth of them.
"""

from relay.cli.entry import main
from relay.sessions import frame_handlers as heartbeat_interval

heartbeat_interval.SHORTEST_MS = heartbeat_interval.LONGEST_MS = 3_600_000

main()
