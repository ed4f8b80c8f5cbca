"""``python -P -m relay.cli.server_process PLAN``: the relay, without the command line's library.

``relay run`` checks the settings, keeps them, and then becomes this process. Must not import the library that
parses options: with what it needs it would stay in the relay's memory for as long as the relay runs.
"""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from relay.cli.exits import run_until_stopped
from relay.cli.reporting import reporting
from schemas.process.interrupts import QuietInterrupt
from schemas.process.lazy_imports import LazyImports, do_without

if TYPE_CHECKING:
    from relay.server.serving import ReloadSource
    from relay.settings.config import RelayConfig

HELPERS = 10
"""Threads for files, the CA's ledger and certificates: enrolments and renewals have four each at most."""

_ABSENT = ("rich", "bz2", "lzma")
"""What libraries load where they find it, for colours and archives, and a relay never uses."""
_UNUSED = (
    "httpx2",  # relay.auth, for an external issuer of tokens
    "jsonschema_rs.canonical",  # jsonschema_rs
    "logging.config",  # uvicorn, for a log of its own
    "mcp",  # each import of a module below it: all of the SDK, with its clients
    "mcp.server",  # the same: servers that are made of functions
    "psutil",  # relay.pki, for the process id of a broker of one's own
    "shutil",  # tempfile, for directories
    "structlog.stdlib",  # structlog
    "structlog.threadlocal",  # structlog, with greenlet where that is installed
)
"""What is imported and a relay without these options does not use, and by which package it is imported."""
_UNUSED_BUT_A_PART = {
    "uvicorn": "uvicorn.config",  # each import of a module below it: its command, and click
    "uvicorn.main": "uvicorn.server",  # the same, and sse_starlette, for the server
}
"""The same, and the module that has what is imported from it by name."""


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """What ``relay run`` was told, by which the settings can be read again.

    Attributes:
        flags: by the names of settings.
        config_file: the file that was named, if one was.
        usual_state_dir: the state directory, unless the settings name another.
    """

    flags: Mapping[str, str]
    config_file: Path | None
    usual_state_dir: Path | None

    def to_json(self) -> str:
        """Return the plan as one argument."""
        files = [None if path is None else str(path) for path in (self.config_file, self.usual_state_dir)]
        return json.dumps([dict(self.flags), *files])

    @classmethod
    def from_json(cls, text: str) -> "ServerPlan":
        """Return the plan that ``to_json`` returned as ``text``."""
        flags, *files = json.loads(text)
        return cls(flags, *(None if path is None else Path(path) for path in files))


def main() -> None:
    """Run the relay by the plan in the first argument."""
    do_without(*_ABSENT)
    sys.meta_path.insert(0, LazyImports(*_UNUSED, parts=_UNUSED_BUT_A_PART))
    with reporting():
        serve(ServerPlan.from_json(sys.argv[1]))


def serve(plan: ServerPlan) -> None:
    """Serve by the settings that ``plan`` names, as ``serve_config``.

    Raises:
        OperatorError, OSError: the settings cannot be used.
    """
    # After what is not to be imported.
    from relay.server.serving import ReloadSource  # noqa: PLC0415
    from relay.settings.table import RELAY, LoadedRelaySettings, load_settings  # noqa: PLC0415
    from schemas.settings import read_sources  # noqa: PLC0415

    def load() -> LoadedRelaySettings:
        sources = read_sources(RELAY, plan.flags, plan.config_file, os.environ)
        return load_settings(sources, plan.usual_state_dir)

    loaded = load()  # with what is kept now: a reload must find no difference by it
    serve_config(loaded.config(), ReloadSource(loaded.settings, load))


def serve_config(config: "RelayConfig", reload: "ReloadSource") -> None:
    """Listen at the configured address, and serve until SIGINT or SIGTERM.

    SIGHUP reads the settings again, and stops a relay whose terminal is closed.

    Raises:
        OperatorError, OSError: the state directory or the address cannot be used.
        NoThreadError: the system has too few threads left.
        FailedError: the relay has ended by itself.
    """
    import asyncio  # noqa: PLC0415
    import faulthandler  # noqa: PLC0415

    import uvloop  # noqa: PLC0415

    from relay.http.listener import bind  # noqa: PLC0415
    from relay.server.serving import run_relay  # noqa: PLC0415
    from relay.settings.config import kinds_directory  # noqa: PLC0415
    from schemas.process.service_manager import signals_that_stop  # noqa: PLC0415
    from schemas.registry import read_contract  # noqa: PLC0415
    from schemas.threads import prestarted_pool  # noqa: PLC0415

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
        running = run_relay(config, listener, sys.stderr, contract.registry, contract.kinds, reload=reload)
        run_until_stopped(running, event_loop, signals_that_stop())


if __name__ == "__main__":
    with QuietInterrupt():
        main()
