"""What ``relay run`` imports besides its options: the server's parts.

Must not be imported by any other command, which would start more slowly.
"""

import asyncio
import faulthandler
import signal
import sys

import uvloop

from relay.cli.event_loop import run_until_stopped
from relay.http.listener import bind
from relay.server.serving import run_relay
from relay.server.settings_reload import ReloadSource
from relay.settings.config import RelayConfig, kinds_directory
from schemas.contract import read_contract
from schemas.process.prestarted_pool import prestarted_pool
from schemas.process.signals import ends_with_its_terminal

HELPERS = 10
"""Threads for files, the CA's ledger and certificates: enrolments and renewals have four each at most."""


def serve(config: RelayConfig, reload: ReloadSource) -> None:
    """Listen at the configured address, and serve until SIGINT or SIGTERM.

    SIGHUP reads the settings again, and stops a relay whose terminal is closed.

    Raises:
        OperatorError, OSError: the state directory or the address cannot be used.
        NoThreadError: the system has too few threads left.
        FailedError: the relay has ended by itself.
    """
    # The watchdog ends a process that hangs by SIGABRT: it then prints the stack of each thread.
    if sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)
    contract = read_contract(config.kinds, kinds_directory(config.state.root))
    helpers = prestarted_pool(HELPERS)

    def event_loop() -> asyncio.AbstractEventLoop:
        loop = uvloop.new_event_loop()
        loop.set_default_executor(helpers)
        return loop

    with bind(config.listen) as listener:
        if not ends_with_its_terminal():
            # Ignored until the relay can reload: the signal would end it.
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        running = run_relay(config, listener, sys.stderr, contract.registry, contract.kinds, reload=reload)
        run_until_stopped(running, event_loop, (signal.SIGINT, signal.SIGTERM))
