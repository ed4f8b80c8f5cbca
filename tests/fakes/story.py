"""The story that a document tells in blocks of shell lines, and the machines on which it is typed.

``<!-- on: MACHINE -->`` over a block is a new terminal on that machine. With ``, until: TEXT`` its last line
goes on running, and the reader goes on to the next block when TEXT is printed. The machines are home
directories, in network and mount namespaces of their own: every port is free, ``hub.example`` is an address,
and ``EDGE`` is the path of the built wheel. Must not change a line of the document.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from relay.broker.nats_server import find_nats_server
from tests.fakes.polling import wait_until

BOUND_S = 120
_SHOWN_LINES = 25
_BLOCK = re.compile(
    r"(?ms)^<!-- on: (?P<machine>\w+)(?:, until: (?P<until>[^\n]+))? -->\n```sh\n(?P<lines>.*?)^```$"
)
_FENCE = re.compile(r"(?m)^```sh$")
_PACKAGES = Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
_OURS = re.compile(r"edge_kubelet-|(schemas|kubelet|relay|pip)$|pip-")
# This interpreter. An environment that it makes has all that the wheel depends on, and not the wheel.
_PYTHON = """#!/bin/sh -e
{python} "$@"
if [ "$1 $2 $3" = "-P -m venv" ]; then
  echo "{packages}" >"$4/{below}/installed.pth"
fi
"""
# scp [-r] MACHINE.example:FILE... . whose files are below the machine's home directory.
_SCP = """#!/bin/sh -e
[ "$1" != -r ] || shift
while [ $# -gt 1 ]; do
  cp -r -- "{directory}/${{1%%.example:*}}/${{1#*:}}" .
  shift
done
"""


class NamespacesError(Exception):
    """This machine has no namespaces to give; the text is why."""


@dataclass(frozen=True, slots=True)
class Block:
    """What is typed into one terminal. ``until`` is None where every line ends by itself."""

    machine: str
    until: str | None
    lines: str


def blocks_of(section: str) -> list[Block]:
    """Return the blocks of ``section``, in its order.

    Raises:
        ValueError: a block of shell lines has no machine; it would be passed over.
    """
    blocks = [Block(**match.groupdict()) for match in _BLOCK.finditer(section)]
    if len(blocks) != len(_FENCE.findall(section)):
        raise ValueError("a block of shell lines does not say on which machine it is typed")
    return blocks


class Machines:
    """The machines of a story, below ``directory``, in the namespaces of the process ``pid``."""

    def __init__(self, directory: Path, wheel: Path, pid: int) -> None:
        self._directory = directory
        self._wheel = wheel
        self._enter = ("nsenter", "--user", "--net", "--mount", "--preserve-credentials", f"--target={pid}")
        self._running: list[subprocess.Popen[bytes]] = []

    def type(self, block: Block) -> str:
        """Type the lines of ``block``, and return what they have printed, also on standard error.

        Raises:
            AssertionError: a line failed, or did not print in time what is waited for.
        """
        home = self._directory / block.machine
        home.mkdir(exist_ok=True)
        number = len(list(self._directory.glob("*.printed")))
        printed = self._directory / f"{number}-{block.machine}.printed"
        with printed.open("wb") as output:
            terminal = subprocess.Popen(
                # -e: the first line that fails ends it. -v: the output shows which.
                [*self._enter, "env", "-C", str(home), "bash", "-evc", block.lines],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment(home),
                start_new_session=True,
            )
        self._running.append(terminal)
        text = block.until

        def done() -> bool:
            shown = text is not None and text in printed.read_text("utf-8")
            return shown or terminal.poll() is not None

        try:
            wait_until(done, BOUND_S)
        except TimeoutError:
            raise AssertionError(f"not done after {BOUND_S} s:\n{self._ends()}") from None
        expected = 0 if text is None else None
        assert terminal.poll() == expected, self._ends()
        return printed.read_text("utf-8")

    def _ends(self) -> str:
        """Return the last lines of every terminal: the cause of a failure may be on another machine."""
        terminals = sorted(self._directory.glob("*.printed"), key=lambda path: int(path.name.split("-")[0]))
        ends = ((path.name, *path.read_text("utf-8").splitlines()[-_SHOWN_LINES:]) for path in terminals)
        return "\n".join(line for end in ends for line in end)

    def stop(self) -> None:
        """Type Ctrl-C into each terminal in which a line still runs, the last first."""
        for terminal in reversed(self._running):
            if terminal.poll() is None:
                os.killpg(terminal.pid, signal.SIGINT)
                try:
                    terminal.wait(BOUND_S)
                except subprocess.TimeoutExpired:
                    os.killpg(terminal.pid, signal.SIGKILL)
                    raise

    def _environment(self, home: Path) -> Mapping[str, str]:
        return {
            "HOME": str(home),
            "PATH": f"{self._directory / 'bin'}:/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG": "C.UTF-8",
            # A user's directories would be below HOME; root's are the machine's.
            "RELAY_STATE_DIR": str(home / "relay-state"),
            "KUBELET_STATE_DIR": str(home / "kubelet-state"),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "EDGE": str(self._wheel),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }


@contextmanager
def machines(directory: Path, wheels: Path, names: str = "127.0.0.1 hub.example") -> Iterator[Machines]:
    """Hold machines below ``directory`` on which ``EDGE`` is the path of the wheel in ``wheels``.

    ``names`` are the lines of their hosts file, all of which are addresses of this machine's loopback.

    Raises:
        NamespacesError: this machine gives no namespaces.
    """
    _make_programs(directory, _make_installed(directory / "installed"))
    hosts = directory / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{names}\n", "ascii")
    script = 'ip link set lo up && mount --bind "$1" /etc/hosts && echo made && exec cat'
    unshare = ("unshare", "--user", "--map-root-user", "--net", "--mount")
    holder = subprocess.Popen(
        [*unshare, "bash", "-c", script, "-", str(hosts)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stderr is not None
    try:
        if holder.stdout.readline() != "made\n":
            raise NamespacesError(holder.stderr.read().strip())
        [wheel] = wheels.glob("edge_kubelet-*.whl")
        made = Machines(directory, wheel, holder.pid)
        try:
            yield made
        finally:
            made.stop()
    finally:
        holder.communicate(timeout=BOUND_S)


def _make_programs(directory: Path, packages: Path) -> None:
    """Make the programs of every machine whose own would need an index, or a server."""
    programs = directory / "bin"
    programs.mkdir()
    python = Path(sys.base_prefix) / "bin" / f"python{sysconfig.get_python_version()}"
    texts = {
        "python3": _PYTHON.format(python=python, packages=packages, below=_PACKAGES),
        "scp": _SCP.format(directory=directory),
    }
    for name, text in texts.items():
        (programs / name).write_text(text, "utf-8")
        (programs / name).chmod(0o755)
    (programs / "nats-server").symlink_to(find_nats_server())


def _make_installed(prefix: Path) -> Path:
    """Make an installation of what is installed here but this project and pip; return its packages."""
    packages = prefix / _PACKAGES
    packages.mkdir(parents=True)
    for entry in (Path(sys.prefix) / _PACKAGES).iterdir():
        if not _OURS.match(entry.name):
            (packages / entry.name).symlink_to(entry)
    # A distribution finds its programs from its place among the packages.
    (prefix / "bin").symlink_to(sysconfig.get_path("scripts"))
    return packages


def missing_programs() -> list[str]:
    """Return the programs that machines need and this one has not."""
    return [program for program in ("unshare", "nsenter", "ip", "mount") if shutil.which(program) is None]
