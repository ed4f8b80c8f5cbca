"""Runs the relay's own broker as a child process: started, awaited, started again when it ends, and stopped.

One relay at a time has the directory. The broker's port is not changed here: nodes have been told it.
Must not decide who is admitted, and must not end a process that no relay of this directory has started.
"""

import asyncio
import fcntl
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from structlog.typing import FilteringBoundLogger

from relay.broker.leftover import end_leftover, record
from relay.broker.log_lines import BrokerLines
from relay.broker.ports import is_free, listening
from relay.broker.server_config import AccessFiles, nats_config
from schemas.addresses import BrokerAddress, HostPort
from schemas.backoff import Backoff
from schemas.error_roots import OperatorError
from schemas.files import PRIVATE, make_private_directory, open_state, write_atomic
from schemas.health import Health
from schemas.text import printable

_POLL_S = 0.02
_START_TIMEOUT_S = 60.0  # a store of a gigabyte is read meanwhile
_STOP_TIMEOUT_S = 10.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 30.0
_HELD_S = 60.0
"""A broker that has run for so long is started again without a longer wait."""


class BrokerStartError(OperatorError):
    """The broker cannot be started; the text says why and what to do."""


class BrokerSupervisor:
    """The broker at ``listen``, with its files in ``directory``; it admits clients by ``access``.

    ``probe_node`` is as ``relay.broker.log_lines`` has it.

    Attributes:
        is_running: whether the broker listens.
    """

    def __init__(  # noqa: PLR0913 - what comes in from outside
        self,
        listen: BrokerAddress,
        directory: Path,
        access: AccessFiles | None,
        *,
        find_program: Callable[[], Path],
        on_end: Callable[[], None],
        probe_node: str,
        log: FilteringBoundLogger,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._address = listen
        self._listen = HostPort(listen.host, listen.port)
        self._find_program = find_program
        self._program: Path | None = None
        self._directory = directory
        self._access = access
        self._on_end = on_end
        self._probe_node = probe_node
        self._log = log
        self._monotonic = monotonic
        self._sleep = sleep
        self._config = directory / "nats-server.conf"
        self._record = directory / "nats-server.process"
        self._lock: int | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._lines = BrokerLines(log, monotonic, probe_node)
        self._started_s = 0.0
        self.is_running = False

    async def start(self) -> None:
        """Start the broker, and return when it listens.

        Raises:
            ProgramError: there is no nats-server.
            BrokerStartError: another relay has the directory, the port is in use, or the broker has ended.
            OSError: a file cannot be used.
        """
        program = await asyncio.to_thread(self._find_program)
        make_private_directory(self._directory)
        self._take_lock()
        try:
            if (pid := await asyncio.to_thread(end_leftover, self._record, self._config)) is not None:
                self._log.warning("broker of an earlier relay ended", pid=pid)
            self._check_port()
            make_private_directory(store := self._directory / "store")
            write_atomic(self._config, nats_config(self._listen, store, self._access), PRIVATE)
            self._program = program
            await self._launch()
        except BaseException:
            await self.close()
            raise

    async def run(self) -> None:
        """Start the broker again whenever it ends, until cancelled."""
        backoff = Backoff(_FIRST_WAIT_S, _LONGEST_WAIT_S)
        while True:
            status = await self._ended()
            self.is_running = False
            self._on_end()
            if self._monotonic() - self._started_s > _HELD_S:
                backoff.reset()
            wait_s = backoff.next_s()
            self._log.error(
                "broker ended", status=status, last_lines=self._lines.last(), started_again_in_s=wait_s
            )
            await self._sleep(wait_s)
            try:
                await self._launch()
            except BrokerStartError:
                pass  # the next turn reports it
            except OSError as error:
                self._log.error("broker not started", reason=printable(str(error)))

    @property
    def health(self) -> Health:
        """Its health: it is live while it is tried again, since a restart of the relay would not help.

        Whether calls wait for it is the health of the relay's connection to it.
        """
        state = "running" if self.is_running else "ended: started again"
        started, ready = self._process is not None, self.is_running
        return Health(started=started, live=True, ready=ready, state=state, essential=False)

    @property
    def own_port(self) -> int | None:
        """The port of this machine on which it speaks its own protocol, while it runs."""
        if self._process is None or not self.is_running:
            return None
        return next(iter(listening(self._process.pid) - {self._listen.port}), None)

    def reload(self) -> bool:
        """Have the broker read its access lists again; False: it starts, and may have read the old ones."""
        process = self._process
        if process is None or process.returncode is not None:
            return True  # it reads them when it starts
        if self.is_running:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGHUP)
        return self.is_running

    async def close(self) -> None:
        """Stop the broker, and return when it has ended."""
        if self._process is not None:
            await self._stop(self._process)
            self._process = None
            self._record.unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _take_lock(self) -> None:
        self._lock = open_state(self._directory / "lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            self._lock = None
            raise BrokerStartError(f"another relay runs with {self._directory}: stop it first") from None

    def _check_port(self) -> None:
        if not is_free(self._listen):
            raise BrokerStartError(
                f"the port of {self._address} is in use, which nodes were told as the relay's broker: "
                "free it, or choose another with --broker-listen"
            )

    async def _launch(self) -> None:
        """Start the process, and return when it listens.

        Raises:
            BrokerStartError: it has ended, or does not listen in time and was stopped.
        """
        # -P: else Python would take modules from the working directory first. A session of its own: Ctrl-C
        # reaches the relay alone, which ends its connection to the broker first.
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "relay.broker.child", str(os.getpid())),
            *(str(self._program), str(self._config)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        self._started_s = self._monotonic()
        self._lines = BrokerLines(self._log, self._monotonic, self._probe_node)
        if self._process.stderr is not None:
            self._reading = asyncio.create_task(self._lines.read(self._process.stderr))
        try:
            with suppress(FileNotFoundError):  # it has ended
                await asyncio.to_thread(record, self._process.pid, self._record)
            async with asyncio.timeout(_START_TIMEOUT_S):
                await self._until_listening(self._process)
        except TimeoutError:
            await self._stop(self._process)
            raise BrokerStartError(f"nats-server does not listen after {_START_TIMEOUT_S:.0f} s") from None
        except OSError:
            await self._stop(self._process)
            raise
        self.is_running = True
        self._log.info("broker started", listen=str(self._address), pid=self._process.pid)

    async def _until_listening(self, process: asyncio.subprocess.Process) -> None:
        while self._listen.port not in await asyncio.to_thread(listening, process.pid):
            if process.returncode is not None:
                await self._drained()
                reason = self._lines.last() or "no output"
                raise BrokerStartError(f"nats-server ended with status {process.returncode}: {reason}")
            await asyncio.sleep(_POLL_S)

    async def _ended(self) -> int | None:
        if self._process is None:
            return None
        status = await self._process.wait()
        await self._drained()
        return status

    async def _stop(self, process: asyncio.subprocess.Process) -> None:
        self.is_running = False
        try:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.terminate()
                async with asyncio.timeout(_STOP_TIMEOUT_S):
                    await process.wait()
        except TimeoutError:
            self._log.error("broker killed", reason="it did not stop in time")
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        await self._drained()

    async def _drained(self) -> None:
        """Wait for the last lines of a process that has ended."""
        if self._reading is not None:
            await self._reading
            self._reading = None
