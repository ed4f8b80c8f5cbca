"""A Linux board of files below a directory, with programs that a test scripts, and its handlers."""

import io
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from kubelet.ceiling import Ceiling, table_of
from kubelet.handlers.base import BuiltInHandler, Handler
from kubelet.handlers.machine import LinuxMachine, Printed
from schemas.process.logs import make_logger
from schemas.registry import read_contract
from tests.fakes.signer import NODE_ID, NOW_MS

HOUR_US = 3_600_000_000
UPTIME_US = HOUR_US

PI = {
    "/proc/meminfo": "MemTotal: 4000000 kB\nMemAvailable: 3000000 kB\n",
    "/proc/pressure/memory": "some avg10=0 avg60=0.00 total=0\nfull avg10=0 avg60=0.00 total=0\n",
    "/proc/vmstat": "oom_kill 0\n",
    "/proc/loadavg": "0.50 0.40 0.30 1/100 999\n",
    "/proc/net/route": (
        "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n"
        "wlan0\t00000000\t0101A8C0\t0003\t0\t0\t600\t00000000\n"
    ),
    "/etc/resolv.conf": "# made by hand\nnameserver 192.168.1.1\n",
    "/sys/class/hwmon/hwmon0/name": "cpu_thermal",
    "/sys/class/hwmon/hwmon0/temp1_input": "47200",
    "/sys/class/hwmon/hwmon0/temp1_crit": "110000",
    "/sys/class/thermal/thermal_zone0/type": "cpu-thermal",
    "/sys/class/thermal/thermal_zone0/temp": "47200",
    "/sys/devices/platform/soc/soc:firmware/get_throttled": "0",
    "/sys/class/net/wlan0/carrier_changes": "2",
    "/sys/firmware/devicetree/base/model": "Raspberry Pi 4 Model B Rev 1.4\0",
}
"""A Raspberry Pi 4 that is well."""


@dataclass
class Board:
    """A machine of ``files``, whose ``programs`` print what is written here, by their first words."""

    root: Path
    programs: Mapping[str, Printed] = field(default_factory=dict)
    monotonic_us: int = UPTIME_US
    suspended_us: int = 0
    commands: list[Sequence[str]] = field(default_factory=list)
    hung: Callable[[Sequence[str], int, float], Awaitable[Printed]] | None = None
    ceiling: Ceiling = field(default_factory=Ceiling)

    def write(self, files: Mapping[str, str]) -> None:
        for path, text in files.items():
            file = self.root / path.lstrip("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")

    async def run(self, command: Sequence[str], limit: int, within_s: float) -> Printed:
        if self.hung is not None:
            return await self.hung(command, limit, within_s)
        self.commands.append(command)
        for words in (" ".join(command[:2]), command[0]):
            if words in self.programs:
                return self.programs[words]
        raise FileNotFoundError(command[0])

    def handler(self, kind: str) -> BuiltInHandler:
        row = read_contract((kind,)).kinds.get(kind)
        assert row is not None
        machine = LinuxMachine(
            self.root,
            self.run,
            lambda: self.monotonic_us,
            lambda: self.monotonic_us + self.suspended_us,
        )
        log = make_logger("kubelet", io.StringIO())
        module = import_module(f"kubelet.handlers.{kind.replace('.', '_')}")
        handler: BuiltInHandler = module.HANDLER(row.capability, NODE_ID, lambda: NOW_MS, log, machine)
        handler.ceiling = self.ceiling
        return handler

    def limit(self, kind: str, **lists: Sequence[str] | bool) -> None:
        """Let the board's owner have one table, of ``kind``."""
        self.ceiling.replace({kind: table_of(kind, json.dumps(lists))})

    async def ask(self, kind: str, verb: str = "snapshot", **arguments: Any) -> dict[str, Any]:
        """Return an answer as an agent gets it, which fits its document."""
        return await asked(self.handler(kind), verb, **arguments)


async def asked(handler: Handler, verb: str, **arguments: Any) -> dict[str, Any]:
    kind = handler.capability["kind"]
    contract = read_contract((kind,))
    known = contract.kinds.get(kind)
    assert known is not None
    contract.registry.load(known.verbs[verb].input_ref).check(arguments)
    shown: dict[str, Any] = known.verbs[verb].shown(await handler.invoke(verb, arguments))
    contract.registry.load(known.verbs[verb].output_ref).check(shown)
    return shown


def show(**units: Mapping[str, str]) -> Printed:
    blocks = (
        "\n".join(f"{name}={value}" for name, value in {"Id": unit, **facts}.items())
        for unit, facts in units.items()
    )
    return Printed("\n\n".join(blocks) + "\n", 0)


def stat(pid: int, name: str, ticks: int, pages: int, started: int = 100) -> str:
    return f"{pid} ({name}) S 1 1 1 0 -1 0 0 0 0 0 {ticks} 0 0 0 20 0 3 0 {started} 0 {pages} 0"


def entry(text: object, number: int = 0, **fields: object) -> str:
    return json.dumps(
        {
            "__CURSOR": f"s=1;i={number}",
            "__REALTIME_TIMESTAMP": str((NOW_MS - number) * 1000),
            "MESSAGE": text,
            "PRIORITY": "6",
            "_SYSTEMD_UNIT": "ssh.service",
            "SYSLOG_IDENTIFIER": "sshd",
            **fields,
        }
    )


def journal(*lines: str, code: int | None = 0) -> Mapping[str, Printed]:
    loaded = show(**{"ssh.service": {"LoadState": "loaded", "ActiveState": "active"}})
    return {"journalctl": Printed("\n".join(lines), code), "systemctl": loaded}
