"""A unit's mounts and limits by bwrap, for machines on which systemd cannot run as PID 1.

What takes cgroups or a filter of system calls is left out: ``MemoryMax``, ``TasksMax``, ``IPAddressDeny``,
``SystemCallFilter`` and ``RestrictAddressFamilies``. Must not change anything of the machine.
"""

import resource
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

import kubelet

_TO = "/opt/edge-kubelet"
_UID = "990"
_HIDDEN_HOMES = ("/home", "/root", "/run/user")
_ENVIRONMENT = {
    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
    "PYTHONPATH": f"{_TO}/ours:{_TO}/packages",
    "LD_LIBRARY_PATH": f"{_TO}/base/lib",
}


class ConfinedUnit:
    """The service of the file ``unit``, whose state directory is ``state`` outside."""

    def __init__(self, unit: Path, state: Path) -> None:
        lines = (line.partition("=") for line in unit.read_text("utf-8").splitlines())
        self._said: Mapping[str, str] = {name: value for name, _, value in lines if not name.startswith("#")}
        self._state = state
        state.mkdir(mode=0o700)

    @property
    def open_files(self) -> int:
        """How many the service may have: the unit's limit, or what this process may give."""
        return min(int(self._said["LimitNOFILE"]), resource.getrlimit(resource.RLIMIT_NOFILE)[1])

    def begin(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        """Start ``command`` as the unit's user; ``python`` is the interpreter of this environment."""
        program = [f"{_TO}/base/bin/python3", "-P"] if command[0] == "python" else [command[0]]
        home = f"/var/lib/{self._said['StateDirectory']}"  # as its sysusers file has it
        given = (
            word
            for pair in {**_ENVIRONMENT, "HOME": home, **environment}.items()
            for word in ("--setenv", *pair)
        )
        return subprocess.Popen(
            [
                "/usr/bin/prlimit",
                *self._limits(),
                "bwrap",
                *self._mounts(),
                "--clearenv",
                *given,
                "--",
                *program,
                *command[1:],
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _limits(self) -> Iterator[str]:
        yield f"--core={self._said['LimitCORE']}"
        yield f"--nofile={self.open_files}"

    def _mounts(self) -> Iterator[str]:
        said = self._said
        yield from ("--die-with-parent", "--unshare-user", "--unshare-pid", "--uid", _UID, "--gid", _UID)
        if not said["CapabilityBoundingSet"]:
            yield from ("--cap-drop", "ALL")
        yield from (
            "--ro-bind" if said["ProtectSystem"] == "strict" else "--bind",
            "/",
            "/",
            "--proc",
            "/proc",
        )
        if said["PrivateDevices"] == "yes":
            yield from ("--dev", "/dev")
        if said["PrivateIPC"] == "yes":
            yield "--unshare-ipc"
        yield from ("--tmpfs", "/opt", "--tmpfs", "/run", "--tmpfs", "/var/lib")
        for kind, place in self._programs().items():
            yield from ("--ro-bind", place, f"{_TO}/{kind}")
        hidden: tuple[str, ...] = ("/tmp", "/var/tmp") if said["PrivateTmp"] == "yes" else ()  # noqa: S108 - covered
        if said["ProtectHome"] == "yes":
            hidden += tuple(home for home in _HIDDEN_HOMES if Path(home).is_dir())
        for directory in hidden:
            yield from ("--tmpfs", directory)
        yield from ("--bind", str(self._state), f"/var/lib/{said['StateDirectory']}")
        if "RuntimeDirectory" in said:
            yield from ("--tmpfs", f"/run/{said['RuntimeDirectory']}")
        yield from ("--remount-ro", "/opt", "--remount-ro", "/var/lib", "--chdir", "/")

    @staticmethod
    def _programs() -> Mapping[str, str]:
        ours = str(Path(kubelet.__file__).parents[1])
        return {"base": sys.base_prefix, "packages": sysconfig.get_path("purelib"), "ours": ours}
