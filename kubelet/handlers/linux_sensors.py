"""``linux.sensors``: what the kernel's drivers measure, read from ``/sys``.

Must not scale by a table of chips: drivers state their values in the units of the kernel's interfaces. A
sensor that cannot be read is left out.
"""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kubelet.handlers.base import HandlerFactory
from kubelet.handlers.machine import LinuxHandler, LinuxMachine

MOST = 128
_MOST_BATTERIES = 16
_GREATEST = 10**12
"""No answer has room for more, and nothing measures it: a driver states the greatest number that it can."""

_PLACES = (
    ("/sys/class/hwmon", "hwmon*"),
    ("/sys/class/thermal", "thermal_zone*"),
    ("/sys/class/power_supply", "*"),
    ("/sys/bus/iio/devices", "iio:device*"),
    ("/sys/bus/w1/devices", "*"),
)
# The prefix of a hwmon file, the list that it is in, the name of its value, and what one unit counts.
_HWMON = (
    ("temp", "temperatures", "c", 1000),
    ("fan", "fans", "rpm", 1),
    ("in", "voltages", "v", 1000),
    ("curr", "currents", "a", 1000),
    ("power", "powers", "w", 1_000_000),
)
# Bits of the firmware of a Raspberry Pi: now in the low half, since the boot in the high half.
_UNDER_VOLTAGE, _THROTTLED, _SEEN = 1 << 0, 1 << 2, 16
_PI_CHIP = "rpi_volt"
_GET_THROTTLED = "/sys/devices/platform/soc/soc:firmware/get_throttled"
_IIO_TYPE = re.compile("^in_[a-z]+")
_STATUSES = frozenset({"unknown", "charging", "discharging", "not charging", "full"})


class Temperature(NamedTuple):
    """A reading in degrees Celsius, with the limits that the driver states."""

    chip: str
    label: str
    c: float
    high_c: float | None
    critical_c: float | None


class Throttling(NamedTuple):
    """What the firmware of a Raspberry Pi limits, now and since the boot."""

    under_voltage: bool
    throttled: bool
    under_voltage_seen: bool
    throttled_seen: bool


def temperatures(machine: LinuxMachine) -> list[Temperature]:
    """Return the temperatures of chips, and of thermal zones that no chip shows."""
    shown = [
        Temperature(
            _chip(machine, sensor),
            _label(machine, sensor),
            value / 1000,
            _limit(machine, sensor, "max"),
            _limit(machine, sensor, "crit"),
        )
        for sensor, value in _measured(machine, "temp")
    ]
    # The kernel names the chip of a zone after it, with underscores for what a chip's name cannot have.
    chips = {each.chip for each in shown}
    for zone in machine.matching("/sys/class/thermal", "thermal_zone*"):
        name, value = machine.text(zone / "type") or zone.name, _reading(machine, zone / "temp")
        if value is not None and name.replace("-", "_") not in chips:
            critical = _trip(machine, zone, "critical")
            shown.append(
                Temperature(name, zone.name, value / 1000, _trip(machine, zone, "passive"), critical)
            )
    return shown[:MOST]


def throttling(machine: LinuxMachine) -> Throttling | None:
    """Return what a Raspberry Pi limits; None on a machine whose firmware does not say."""
    if (text := machine.text(_GET_THROTTLED)) is not None:
        try:
            bits = int(text, 16)
        except ValueError:
            return None
        now = (bits & _UNDER_VOLTAGE, bits & _THROTTLED)
        return Throttling(*map(bool, (*now, bits >> _SEEN & _UNDER_VOLTAGE, bits >> _SEEN & _THROTTLED)))
    for chip in machine.matching("/sys/class/hwmon", "hwmon*"):
        if machine.text(chip / "name") == _PI_CHIP:
            alarm = machine.number(chip / "in0_lcrit_alarm") == 1
            return Throttling(alarm, throttled=False, under_voltage_seen=alarm, throttled_seen=False)
    return None


def under_voltage_alarms(machine: LinuxMachine) -> list[str]:
    """Return the inputs whose voltage is critically low by their chip, without that of a Raspberry Pi."""
    files = machine.matching("/sys/class/hwmon", "hwmon*/in[0-9]*_lcrit_alarm")
    raised = (_named(file, "_lcrit_alarm") for file in files if machine.number(file) == 1)
    named = ((_chip(machine, sensor), _label(machine, sensor)) for sensor in raised)
    return [f"{chip}/{label}" for chip, label in named if chip != _PI_CHIP]


def _measured(machine: LinuxMachine, prefix: str) -> Iterator[tuple[Path, int]]:
    """Yield each sensor of a chip, which is a path without what its files end with, and its value.

    Some drivers state a power, a voltage or a current as an average alone.
    """
    values: dict[Path, int] = {}
    for end in ("_input", "_average"):
        for file in machine.matching("/sys/class/hwmon", f"hwmon*/{prefix}[0-9]*{end}"):
            if (value := _reading(machine, file)) is not None:
                values.setdefault(_named(file, end), value)
    yield from sorted(values.items())


def _reading(machine: LinuxMachine, file: Path) -> int | None:
    value = machine.number(file)
    return None if value is None or abs(value) > _GREATEST else value


def _named(file: Path, end: str) -> Path:
    return file.with_name(file.name.removesuffix(end))


def _of(sensor: Path, end: str) -> Path:
    return sensor.with_name(f"{sensor.name}_{end}")


def _chip(machine: LinuxMachine, sensor: Path) -> str:
    return machine.text(sensor.parent / "name") or sensor.parent.name


def _label(machine: LinuxMachine, sensor: Path) -> str:
    return machine.text(_of(sensor, "label")) or sensor.name


def _limit(machine: LinuxMachine, sensor: Path, which: str, scale: int = 1000) -> float | None:
    return _set_limit(_reading(machine, _of(sensor, which)), scale)


def _trip(machine: LinuxMachine, zone: Path, which: str) -> float | None:
    for kind in sorted(zone.glob("trip_point_*_type")):
        limit = _set_limit(_reading(machine, kind.with_name(kind.name.replace("_type", "_temp"))))
        if machine.text(kind) == which and limit is not None:
            return limit
    return None


def _set_limit(value: int | None, scale: int = 1000) -> float | None:
    """Return a limit in its unit; None for 0 and less, which drivers state for one that was never set."""
    return None if value is None or value <= 0 else value / scale


class SensorsHandler(LinuxHandler):
    """Answers with all that can be read now."""

    @property
    def lacks(self) -> str | None:
        """That the kernel has no sensor of any sort."""
        found = (self.machine.matching(*place) for place in _PLACES)
        return None if any(found) else "the kernel has no sensors here"

    async def snapshot(self, arguments: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002 - takes none
        """Return every sensor; at most ``MOST`` of each sort.

        On a thread: a sensor on a one-wire bus takes most of a second for each reading.

        Raises:
            ToolFault: ``no_answer``.
        """
        return await self.calls.run(self._read)

    async def subscribe(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the same; the relay asks again for as long as somebody follows."""
        return await self.snapshot(arguments)

    def _read(self) -> dict[str, Any]:
        machine = self.machine
        limits = throttling(machine)
        read = {
            **{name: self._of_chips(prefix, value, scale) for prefix, name, value, scale in _HWMON[1:]},
            "temperatures": [each._asdict() for each in temperatures(machine)],
            "batteries": list(self._batteries())[:_MOST_BATTERIES],
            "wifi": list(self._wifi())[:_MOST_BATTERIES],
            "iio": list(self._iio())[:MOST],
        }
        shown = {name: [each for each in found if self._allows(each)] for name, found in read.items()}
        return {
            **shown,
            "throttling": limits and limits._asdict(),
            "withheld": sum(map(len, read.values())) - sum(map(len, shown.values())),
        }

    def _allows(self, reading: Mapping[str, Any]) -> bool:
        """Return whether the board's owner lets the sensor of ``reading`` be seen."""
        if "interface" in reading:
            return self.allows("interfaces", reading["interface"])
        names = (
            reading[member] for member in ("chip", "label", "device", "channel", "name") if member in reading
        )
        return self.allows("sensors", "/".join(names))

    def _of_chips(self, prefix: str, value: str, scale: int) -> list[dict[str, Any]]:
        machine = self.machine
        return [
            {
                "chip": _chip(machine, sensor),
                "label": _label(machine, sensor),
                value: number / scale,
                f"low_{value}": _limit(machine, sensor, "min", scale),
                f"high_{value}": _limit(machine, sensor, "max", scale),
            }
            for sensor, number in _measured(machine, prefix)
        ][:MOST]

    def _batteries(self) -> Iterator[dict[str, Any]]:
        for supply in self.machine.matching("/sys/class/power_supply", "*"):
            if self.machine.text(supply / "type") == "Battery":
                status = (self.machine.text(supply / "status") or "").lower()
                percent = self.machine.number(supply / "capacity")
                yield {
                    "name": supply.name,
                    "percent": None if percent is None else min(max(percent, 0), 100),
                    "status": status if status in _STATUSES else None,
                }

    def _wifi(self) -> Iterator[dict[str, Any]]:
        """Read the kernel's table: a line for each interface, whose fourth column is the level in dBm."""
        for line in (self.machine.text("/proc/net/wireless") or "").splitlines()[2:]:
            interface, _, columns = line.strip().partition(":")
            try:
                level = float(columns.split()[2].rstrip("."))
            except (ValueError, IndexError):
                continue
            yield {"interface": interface, "signal_dbm": level}

    def _iio(self) -> Iterator[dict[str, Any]]:
        # Some drivers state a channel in its unit, without a scale.
        for end in ("_raw", "_input"):
            for file in self.machine.matching("/sys/bus/iio/devices", f"iio:device*/in_*{end}"):
                if (value := self._decimal(file)) is not None:
                    channel = _named(file, end)
                    if end == "_raw":
                        value = (value + self._factor(channel, "offset", 0)) * self._factor(
                            channel, "scale", 1
                        )
                    if not abs(value) <= _GREATEST:
                        continue  # nor what is no number any more
                    device = self.machine.text(file.parent / "name") or file.parent.name
                    yield {"device": device, "channel": channel.name.removeprefix("in_"), "value": value}
        for file in self.machine.matching("/sys/bus/w1/devices", "*/temperature"):
            if (value := self._decimal(file)) is not None:
                yield {"device": file.parent.name, "channel": "temp", "value": value}

    def _factor(self, channel: Path, which: str, otherwise: float) -> float:
        """Return what is stated for ``channel``, or for all of its type; an average has none of its own."""
        alone = _named(channel, "_mean")
        found = (alone, *(channel.with_name(each) for each in _IIO_TYPE.findall(alone.name)))
        stated = (self._decimal(_of(each, which)) for each in found)
        return next((each for each in stated if each is not None), otherwise)

    def _decimal(self, file: Path) -> float | None:
        try:
            value = float(self.machine.text(file) or "")
        except ValueError:
            return None
        return value if math.isfinite(value) else None


HANDLER: HandlerFactory = SensorsHandler
