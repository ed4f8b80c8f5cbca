"""``python -P -m bench.quiet_relay ...``: ``relay``, which lets its nodes choose their heartbeats.

A relay requests one a minute. A fleet whose heartbeats come at a time that is known has seconds without any,
in which what an idle second costs can be measured, and then a minute's worth of them.
"""

import relay.config

relay.config.HEARTBEAT_INTERVAL_MS = 3_600_000

from relay.cli.entry import main  # noqa: E402 - what it imports takes the interval by its name

main()
