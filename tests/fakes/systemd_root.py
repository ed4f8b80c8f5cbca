"""systemd as PID 1 of a root of its own on this machine, in which the units really run.

The script beside this module makes the root: namespaces, and an overlay that is held in memory. Must not
change anything of the machine.
"""

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import kubelet
from tests.fakes.polling import wait_until

BOUND_S = 60
_SCRIPT = Path(__file__).with_suffix(".sh")
_SYSTEMD = Path("/lib/systemd/systemd")
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_PROGRAMS = ("PATH=/opt/edge-kubelet/bin:" + _PATH, "LD_LIBRARY_PATH=/opt/edge-kubelet/base/lib")
_NEEDED = ("unshare", "nsenter", "findmnt", "mount", "ip")


class SystemdRootError(Exception):
    """This machine cannot start systemd in a root of its own; the text is why."""


class SystemdRoot:
    """A root in which systemd runs as PID 1, by the id that its process has outside.

    ``environment`` is that of each command.
    """

    def __init__(self, pid: int, environment: tuple[str, ...]) -> None:
        self._environment = environment
        self._enter = (
            "nsenter",
            f"--target={pid}",
            "--mount",
            "--uts",
            "--ipc",
            "--net",
            "--pid",
            "--cgroup",
        )

    def begin(self, *command: str) -> subprocess.Popen[str]:
        """Start ``command`` in the root, as root, and return it."""
        return subprocess.Popen(
            [*self._enter, "env", "-i", *self._environment, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A signal to its process group must not reach the test.
            start_new_session=True,
        )

    def run(self, *command: str, given: str = "") -> str:
        """Return what ``command`` prints, which is given ``given``.

        Raises:
            AssertionError: it failed.
        """
        process = self.begin(*command)
        out, err = process.communicate(given, timeout=BOUND_S)
        assert process.returncode == 0, f"{command}: {process.returncode}\n{out}{err}"
        return out

    def write(self, file: str, text: str) -> None:
        """Write ``text`` to ``file`` in the root."""
        self.run("sh", "-c", f"umask 022; mkdir -p $(dirname {file}); cat > {file}", given=text)

    def copy(self, source: Path, directory: str) -> None:
        """Copy the file ``source`` of the machine to ``directory`` in the root."""
        place = f"{directory}/{source.name}"
        with source.open("rb") as given:
            subprocess.run(
                [*self._enter, "sh", "-c", 'mkdir -p "$0" && cat > "$1"', directory, place],
                stdin=given,
                timeout=BOUND_S,
                check=True,
            )

    def show(self, unit: str, name: str) -> str:
        return self.run("systemctl", "show", "--value", f"--property={name}", unit).strip()

    def until(self, unit: str, name: str, value: str) -> None:
        """Wait until a property of a unit begins with ``value``."""
        wait_until(lambda: self.show(unit, name).startswith(value), BOUND_S)

    def log(self, unit: str) -> str:
        """Return what the unit has logged, and systemd of it."""
        return self.run("journalctl", "--unit", unit, "--no-pager", "--output=cat")


@contextmanager
def running(work: Path, *, with_programs: bool = True) -> Iterator[SystemdRoot]:
    """Hold a root below ``work``, with the programs of this environment, or with those of the machine alone.

    Raises:
        SystemdRootError: this machine cannot.
    """
    _check()
    inner = work / "root"
    inner.mkdir()
    name = f"edge-test-{os.getpid()}-{work.name}"
    places = [sys.base_prefix, sysconfig.get_path("purelib"), str(Path(kubelet.__file__).parents[1])]
    outer = subprocess.Popen(
        ["/bin/bash", str(_SCRIPT), "outside", str(inner), name, *(places if with_programs else [])],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        pid = _child_of(outer)
        root = SystemdRoot(pid, _PROGRAMS if with_programs else (f"PATH={_PATH}",))
        try:
            wait_until(lambda: _is_up(root), BOUND_S)
        except TimeoutError:
            raise SystemdRootError("systemd did not start") from None
        yield root
    finally:
        with suppress(ProcessLookupError, NameError, UnboundLocalError):
            os.kill(pid, signal.SIGKILL)
        outer.communicate(timeout=BOUND_S)
        _remove_cgroups(inner / "cgroups")


def _check() -> None:
    if os.geteuid() != 0:
        raise SystemdRootError("it takes root")
    if not _SYSTEMD.exists():
        raise SystemdRootError(f"{_SYSTEMD} is not installed")
    for program in _NEEDED:
        if shutil.which(program, path=_PATH) is None:
            raise SystemdRootError(f"{program} is not installed")


def _child_of(outer: subprocess.Popen[str]) -> int:
    children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")

    def systemd() -> int | None:
        if outer.poll() is not None:
            assert outer.stderr is not None
            raise SystemdRootError(f"no root of its own: {outer.stderr.read().strip()}")
        for child in children.read_text().split():
            with suppress(OSError):  # a child of the script that has ended meanwhile
                if Path(f"/proc/{child}/comm").read_text() == "systemd\n":
                    return int(child)
        return None

    wait_until(lambda: systemd() is not None, BOUND_S)
    found = systemd()
    assert found is not None
    return found


def _is_up(root: SystemdRoot) -> bool:
    process = root.begin("systemctl", "is-system-running")
    return process.communicate(timeout=BOUND_S)[0].strip() in {"running", "degraded"}


def _remove_cgroups(listed: Path) -> None:
    for line in set(listed.read_text().split()) if listed.exists() else ():
        for directory, _, _ in os.walk(line, topdown=False):
            with suppress(OSError):
                Path(directory).rmdir()
