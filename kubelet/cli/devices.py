"""Which class of devices the service may open for kinds of an operator's own: a drop-in of its unit for each.

The unit sees no device otherwise. Must not apply a step.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from schemas.error_roots import CommandLineError
from schemas.process.service_host import UNITS, Remove, Run, Step, Write
from schemas.unknown_names import unknown

_CLASSES: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "gpio": ("gpio", ("char-gpiochip",)),
        "i2c": ("i2c", ("char-i2c",)),
        "spi": ("spi", ("char-spi",)),
        "serial": ("dialout", ("char-ttyACM", "char-ttyAMA", "char-ttyS", "char-ttyUSB")),
        "video": ("video", ("char-video4linux",)),
    }
)
"""The group that a distribution gives the devices to, and their names in /proc/devices."""
DEVICE_CLASSES = tuple(_CLASSES)


def group_of(name: str) -> str:
    """Return the group whose members may open devices of the class ``name``.

    Raises:
        CommandLineError: there is no such class.
    """
    if name not in _CLASSES:
        raise CommandLineError(unknown("class of devices", name, _CLASSES))
    return _CLASSES[name][0]


def device_steps(unit: str, name: str, *, remove: bool) -> Iterator[Step]:
    """Yield what lets ``unit`` open devices of the class ``name``, or no more."""
    file = UNITS / f"{unit}.d" / f"device-{name}.conf"
    yield Remove(file) if remove else Write(file, _drop_in(name))
    if remove:
        yield Remove(Path(file.parent), if_empty=True)
    yield Run(("systemctl", "daemon-reload"))
    yield Run(("systemctl", "try-restart", unit))


def _drop_in(name: str) -> str:
    group, devices = _CLASSES[name]
    allowed = "".join(f"DeviceAllow={device} rw\n" for device in devices)
    # closed: the class, and what every program uses, such as /dev/null and /dev/urandom.
    return f"[Service]\nPrivateDevices=no\nDevicePolicy=closed\n{allowed}SupplementaryGroups={group}\n"
