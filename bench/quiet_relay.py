"""``python -P -m bench.quiet_relay ...``: ``relay``, which lets its nodes choose their heartbeats.

A relay requests one a minute. A fleet whose heartbeats come at a time that is known has seconds without any,
in which what an idle second costs can be measured, and then a minute's worth of them.
"""

import os
from typing import Any

from relay.cli.entry import main
from relay.cli.server_process import ServerPlan, serve
from relay.sessions import frame_handlers as heartbeat_interval

heartbeat_interval.SHORTEST_MS = heartbeat_interval.LONGEST_MS = 3_600_000


def go_on(_program: Any, command: Any) -> Any:
    """Serve in this process, which has changed the interval."""
    serve(ServerPlan.from_json(command[-1]))


os.execv = go_on
main()
