"""Runs the relay's own broker as a child process: started, awaited, started again when it ends, and stopped.

One relay at a time has the directory. The broker's port is not changed here: nodes know it already. What the
broker writes on its standard error becomes lines of the relay's log, bounded and escaped; a broker that an
earlier relay has left behind is ended first. Must not decide who is admitted, and must not end a process that
no relay of this directory has started.
"""

import asyncio
import fcntl
import os
import re
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from attrs import define, field
from structlog.typing import FilteringBoundLogger

from relay.broker.nats_server import AccessFiles, is_free, listening, nats_config
from relay.broker.store import BrokerStore
from schemas import topics
from schemas.addresses import BrokerAddress, HostPort
from schemas.error_roots import OperatorError
from schemas.files import PRIVATE, make_private_directory, open_state, read_state, write_atomic
from schemas.health import Health, endless
from schemas.pacing import Backoff, TokenBucket
from schemas.text import printable

_POLL_S = 0.02
_START_TIMEOUT_S = 60.0  # a store of a gigabyte is read meanwhile
_STOP_TIMEOUT_S = 10.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 30.0
_HELD_S = 60.0
"""A broker that has run for so long is started again without a longer wait."""
_PIECE_BYTES = 16_384
_MAX_LINE = 400
_KEPT = 5
_RATE, _BURST = 1.0, 30.0
_FORM = re.compile(r"\[\d+\] \[(?P<level>[A-Z]{3})\] (?P<text>.*)", re.DOTALL)
_NOTICES = frozenset({"INF", "DBG", "TRC"})
_OF_A_RELOAD = re.compile(r'User ".*" found in connect proto, but user required from cert', re.DOTALL)
"""For each client that is connected when the broker reads its access lists again. The certificate decides."""
_OF_MQTT_5 = re.compile(r'\S+ - mid:\d+ - "" - unacceptable protocol version of 5')
"""A client that speaks MQTT 5 is told so, and uses 3.1.1: `kubelet doctor` is one."""
_OF_A_FULL_STORE = re.compile(r"resource limits exceeded|insufficient resources|maximum bytes exceeded")
_END_TIMEOUT_S = 10.0
_MAX_RECORD_BYTES = 256
_START_FIELD = 19  # of /proc/PID/stat behind the name; field 22 of all


class BrokerStartError(OperatorError):
    """The broker cannot be started; the text says why and what to do."""


@define(eq=False, repr=False)
class BrokerSupervisor:
    """The broker at ``address``, with its files in ``directory``; it admits clients by ``access``.

    ``probe_node`` is as ``BrokerLines`` has it.

    Attributes:
        is_running: whether the broker listens.
    """

    _address: BrokerAddress
    _directory: Path
    _access: AccessFiles | None
    _find_program: Callable[[], Path]
    _on_end: Callable[[], None]
    _probe_node: str
    _log: FilteringBoundLogger
    _monotonic: Callable[[], float] = time.monotonic
    _sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    _program: Path | None = field(init=False, default=None)
    _lock: int | None = field(init=False, default=None)
    _process: asyncio.subprocess.Process | None = field(init=False, default=None)
    _reading: asyncio.Task[None] | None = field(init=False, default=None)
    _started_s: float = field(init=False, default=0.0)
    is_running: bool = field(init=False, default=False)
    _listen: HostPort = field(init=False)
    _config: Path = field(init=False)
    _record: Path = field(init=False)
    _lines: "BrokerLines" = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._listen = HostPort(self._address.host, self._address.port)
        self._config = self._directory / "nats-server.conf"
        self._record = self._directory / "nats-server.process"
        self._lines = BrokerLines(self._log, self._monotonic, self._probe_node)

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


@define(eq=False, repr=False)
class BrokerLines:
    """The lines of one broker process.

    Warnings and errors are logged, at a limited rate, since any client can cause them; notices are not. Lines
    that report neither a fault nor an attack are no warnings, whatever the broker calls them. The last of the
    others are kept for the report of its end. Reading must not stop: the broker would block.

    ``probe_node``: on whose topic `relay doctor` tries to publish, which is to be refused. Another client
    that tried it would be taken for `relay doctor`, so no other program is told this id.
    """

    _log: FilteringBoundLogger
    _monotonic: Callable[[], float]
    _probe_node: str
    _bucket: TokenBucket = field(init=False)
    _left_out: int = field(init=False, default=0)
    _last: deque[str] = field(init=False, factory=lambda: deque(maxlen=_KEPT))

    def __attrs_post_init__(self) -> None:
        self._bucket = TokenBucket(_RATE, _BURST, self._monotonic())

    async def read(self, stream: asyncio.StreamReader) -> None:
        begun = b""
        while piece := await stream.read(_PIECE_BYTES):
            *whole, begun = (begun + piece).split(b"\n")
            for line in whole:
                self.take(line)
            # Of a line without an end, no more is kept than is shown of it.
            begun = begun[: _MAX_LINE * 4]
        if begun:
            self.take(begun)

    def take(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace")
        match = _FORM.fullmatch(text)
        level, shown = (match["level"], match["text"]) if match else ("", text)
        shown = printable(shown.strip(), _MAX_LINE)
        if level in _NOTICES or not shown or _OF_A_RELOAD.fullmatch(shown):
            return
        harmless = self._harmless(shown)
        if harmless is None:
            self._last.append(shown)
        if self._bucket.take(self._monotonic()) > 0:
            self._left_out += 1
            return
        left_out, self._left_out = self._left_out, 0
        facts = {"left_out": left_out} if left_out else {}
        if harmless is not None:
            self._log.info(harmless, **facts)
            return
        if _OF_A_FULL_STORE.search(shown):
            self._log.error("the broker's store is full", line=shown, **facts)
            return
        write = self._log.warning if level == "WRN" else self._log.error
        write("the broker reports", line=shown, **facts)

    def _harmless(self, line: str) -> str | None:
        """Return what a line means that reports neither a fault nor an attack; None if it may be one."""
        heartbeat = topics.subject(topics.heartbeat(self._probe_node))
        if line.endswith(f'Publish Violation - Subject "{heartbeat}"'):
            return "the broker refuses what relay doctor tries, as it should"
        if _OF_MQTT_5.fullmatch(line):
            return "a client tries MQTT 5, which the broker does not speak"
        return None

    def last(self) -> str:
        """Return the last lines that said something wrong, in one line."""
        return " | ".join(self._last)


def record(pid: int, path: Path) -> None:
    """Write into ``path`` which process ``pid`` is.

    Raises:
        OSError: it cannot be written, or there is no such process.
    """
    write_atomic(path, f"{pid} {_start_of(pid)}\n", PRIVATE)


def end_leftover(path: Path, config: Path) -> int | None:
    """End the process that ``path`` names if it runs with ``config``; return its id, None if none was ended.

    The kernel ends the broker with its relay, but that takes a moment, and a suspended process does not end.
    A process id is reused: the record also has when the process started, in ticks since the machine did.
    Reads only what a confined service sees of /proc.

    Raises:
        OSError: the record cannot be read.
    """
    try:
        pid_text, _, start = (
            read_state(path, _MAX_RECORD_BYTES).decode("ascii", "replace").strip().partition(" ")
        )
        pid = int(pid_text)
        # By descriptor: from here on it is this process, and no later one with the same id.
        process = os.pidfd_open(pid) if pid > 1 else None
    except (FileNotFoundError, ProcessLookupError, ValueError, OverflowError):
        return None
    if process is None:
        return None
    try:
        if not _is_the_same(pid, start, config):
            return None
        _end(process)
    except ProcessLookupError:
        return None
    finally:
        os.close(process)
    return pid


def _is_the_same(pid: int, start: str, config: Path) -> bool:
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return _start_of(pid) == start and os.fsencode(config) in arguments
    except (FileNotFoundError, PermissionError):
        return False


def _end(process: int) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        signal.pidfd_send_signal(process, number)
        signal.pidfd_send_signal(process, signal.SIGCONT)
        # The descriptor can be read once the process has ended, whether or not it was waited for.
        ended, _, _ = select.select([process], [], [], _END_TIMEOUT_S)
        if ended:
            return


def _start_of(pid: int) -> str:
    facts = Path(f"/proc/{pid}/stat").read_bytes()
    # The name, in parentheses, can hold anything.
    return facts.rpartition(b")")[2].split()[_START_FIELD].decode("ascii")


@define(eq=False, repr=False)
class RelayBroker:
    """The broker that a relay runs: its process, and its store. ``start`` starts it.

    Attributes:
        probe_node: a node id that no node has, on whose topic `relay doctor` tries to publish.
    """

    _supervisor: BrokerSupervisor
    _store: BrokerStore
    _reads_access_files: bool
    probe_node: str

    async def start(self, write_access_files: Callable[[], object]) -> None:
        """Start it, after ``write_access_files`` if it reads such; return when it listens.

        Raises:
            BrokerStartError: it cannot be started.
            StateError, OSError: a file cannot be used.
        """
        if self._reads_access_files:
            await asyncio.to_thread(write_access_files)
        await self._supervisor.start()

    async def run(self) -> None:
        """Start it again whenever it ends, and bound what it stores, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(endless("broker", self._supervisor.run()))
            tasks.create_task(endless("broker store", self._store.run()))

    async def close(self) -> None:
        await self._supervisor.close()

    @property
    def health(self) -> Health:
        """Whether its process runs."""
        return self._supervisor.health

    @property
    def users(self) -> tuple[str, ...]:
        """Whom it admits besides nodes and the relay, as its list of users has them."""
        return (self._store.user,)

    def reload(self) -> bool:
        """Have it read its access lists again; return whether that is done."""
        return self._supervisor.reload()
