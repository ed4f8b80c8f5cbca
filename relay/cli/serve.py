"""What ``relay run`` imports besides its options: the server's parts, which no other command needs."""

import sys

import uvloop

from relay.cli.event_loop import run_until_stopped
from relay.config import RelayConfig
from relay.http.listener import bind
from relay.server.app import run_relay


def serve(config: RelayConfig) -> None:
    """Listen at the configured address, and serve until a signal comes.

    Raises:
        OperatorError, OSError: the state directory or the address cannot be used.
        FailedError: the relay has ended by itself.
    """
    with bind(config.listen) as listener:
        run_until_stopped(run_relay(config, listener, sys.stderr), uvloop.new_event_loop)
