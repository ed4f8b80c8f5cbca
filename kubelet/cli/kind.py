"""``kubelet kind``: kinds of an operator's own: a new package, and its devices, for which the unit sees none.

Must not overwrite a file.
"""

import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from string import Template
from types import MappingProxyType
from typing import Annotated

import typer

from kubelet.cli.options import StateDir, directory_of, print_facts
from kubelet.cli.service import SERVICE, check_group
from kubelet.config import SERVICE_KINDS, kinds_directory
from kubelet.settings import KINDS, KUBELET
from schemas.error_roots import CommandLineError
from schemas.kinds import KindRegistry, kind_name, shipped_names
from schemas.process.cli_config import AsJson
from schemas.process.cli_kinds import KindCommands, KindName, WheelFile
from schemas.process.cli_manual import example, group
from schemas.process.cli_service import DryRun, need_root, show_steps
from schemas.process.service_host import UNITS, Host, Remove, Run, Step, Write
from schemas.text import unknown

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


_TEMPLATES = Path(__file__).with_name("kind_template")
_FILES: Mapping[str, str] = MappingProxyType(
    {
        "pyproject.toml": "pyproject.toml",
        "%%{package}/__init__.py": "init.py",
        "%%{package}/kind.json": "%%{source}/kind.json",
        "%%{package}/documents/%%{kind}.get.input@1.0.0.json": "%%{source}/input.json",
        "%%{package}/documents/%%{kind}.get.output@1.0.0.json": "%%{source}/output.json",
        "%%{package}/handler.py": "%%{source}/handler.py",
        "tests/__init__.py": "init.py",
        "tests/test_handler.py": "%%{source}/test_handler.py",
    }
)
"""The files of a package, and the templates that they are made of."""


class KindSource(StrEnum):
    """Where the kind has what it answers from."""

    SENSOR = "sensor"
    I2C = "i2c"
    JOURNAL = "journal"
    COMMAND = "command"


_MAX_SHORT = 8
_MAX_CAP_ID = 18
_RESERVED = "system."


class _Text(Template):
    delimiter = "%%"  # JSON Schema has members that begin with a dollar sign


def write_package(name: str, parent: Path, source: KindSource = KindSource.SENSOR) -> Path:
    """Write the package of the kind ``name`` into a new directory of ``parent``, and return that.

    Its handler reads what ``source`` says.

    Raises:
        CommandLineError: no kind of an operator's own can have the name.
        OSError: the directory exists, or cannot be written.
    """
    words = [word for word in re.split(r"[._]", kind_name(name)) if word]
    short = "".join(words)[:_MAX_SHORT]
    if name.startswith(_RESERVED):
        raise CommandLineError(f"{name} is a name of RFC-0001's own kinds: begin with your organisation")
    if name in shipped_names():
        raise CommandLineError(f"{name} ships with this program: choose another name")
    if (other := KindRegistry().by_short(short)) is not None:
        raise CommandLineError(f"{name} would be {short} for short, as {other.name} is: choose another name")
    last = name.rpartition(".")[2]
    values = {
        "kind": name,
        "source": source.value,
        "title": " ".join(word for word in last.split("_") if word).capitalize(),
        "short": short,
        "package": name.replace(".", "_"),
        "distribution": "-".join(words),
        "handler": "".join(word.capitalize() for word in last.split("_")) + "Handler",
        "cap_id": last[:_MAX_CAP_ID],
    }
    root = parent / values["distribution"]
    root.mkdir()
    for path, template in _FILES.items():
        text = (_TEMPLATES / f"{_Text(template).substitute(values)}.template").read_text("utf-8")
        file = root / _Text(path).substitute(values)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_Text(text).substitute(values), "utf-8")
    return root


app = group("Kinds of your own, in packages.")
_COMMANDS = KindCommands(KUBELET, KINDS, SERVICE_KINDS, run_here=True)


@app.callback()
def options() -> None:
    """Kinds of your own, in packages."""


@app.command(epilog=example("edge-kubelet kind new acme.oven --from sensor"))
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The kind, such as acme.oven.")],
    directory: Annotated[
        Path, typer.Option(metavar="DIRECTORY", help="Where to make the package's directory.")
    ] = Path(),
    source: Annotated[
        KindSource,
        typer.Option(
            "--from", help="What it reads: a driver's sensor, one on I2C, the journal, or a command."
        ),
    ] = KindSource.SENSOR,
    as_json: AsJson = False,
) -> None:
    """Write the package of a new kind: row, documents, handler and test, which pass as they are."""
    root = write_package(name, directory, source)
    # This interpreter has what the package needs, also where it is a service's own.
    test = shlex.join([sys.executable, "-P", "-m", "unittest", "discover", str(root)])
    if as_json:
        print_facts({"kind": name, "directory": str(root), "test": test}, as_json=True)
    else:
        typer.echo(f"{name} is in {root}\nIts test: {test}")


@app.command("allow-device", epilog=example("kubelet kind allow-device i2c --dry-run"))
def allow_device(
    name: Annotated[str, typer.Argument(metavar="CLASS", help=f"A class of devices: {', '.join(_CLASSES)}.")],
    remove: Annotated[bool, typer.Option("--remove", help="The service may not open it any more.")] = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Let the service open devices of one class, by a drop-in of its unit; it sees none otherwise."""
    if name not in _CLASSES:
        raise CommandLineError(unknown("class of devices", name, _CLASSES))
    check_group(_CLASSES[name][0], f"to which devices of {name} belong")
    steps = Host().due(device_steps(SERVICE.unit, name, remove=remove))
    if not dry_run:
        need_root(f"kubelet kind allow-device {name}")
        Host().apply(steps)
    show_steps(steps, dry_run=dry_run, as_json=as_json)


@app.command(epilog=example("kubelet kind install acme_uptime-1.0.0-py3-none-any.whl"))
def install(
    wheel: WheelFile,
    requirements: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What it needs: lines NAME==VERSION --hash=sha256:HEX"),
    ] = None,
    state_dir: StateDir = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Put the package of a kind where the daemon finds it, with what it needs, and nothing of the daemon's.

    Wheels of what it needs lie beside FILE, or pip downloads them, where this program's environment has it.
    """
    place = kinds_directory(directory_of(state_dir))
    _COMMANDS.install(place, wheel, requirements, dry_run=dry_run, as_json=as_json)


@app.command(epilog=example("kubelet kind uninstall acme.uptime"))
def uninstall(
    name: KindName,
    state_dir: StateDir = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Remove the package that brings a kind, and what was installed with it."""
    _COMMANDS.uninstall(kinds_directory(directory_of(state_dir)), name, dry_run=dry_run, as_json=as_json)


@app.command("list", epilog=example("kubelet kind list"))
def list_installed(state_dir: StateDir = None, as_json: AsJson = False) -> None:
    """List the packages that `kubelet kind install` has installed, and their kinds."""
    _COMMANDS.show(kinds_directory(directory_of(state_dir)), as_json=as_json)
