"""The command lines of both programs, run in the process of the test, from the entry point to the exit code.

Must not run what becomes or serves a daemon: that takes the process over.
"""

import os
import pwd
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

import kubelet.cli.commands
import relay.cli.entry
from schemas.certificates import make_csr
from tests.fakes.built_commands import build_commands_once
from tests.fakes.relay_command import FREE_PORT
from tests.fakes.signer import NODE_ID, key_named

_MAINS = {"kubelet": kubelet.cli.commands.main, "relay": relay.cli.entry.main}


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str


class CommandLines:
    """Both programs, with ``settings`` as the only ones that the environment makes."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        captured: pytest.CaptureFixture[str],
        settings: dict[str, str],
    ) -> None:
        build_commands_once(monkeypatch)
        self._patch = monkeypatch
        self._captured = captured
        for name in _settings_of_the_environment():
            monkeypatch.delenv(name)
        for name, value in {"RELAY_CONFIG": "", "KUBELET_CONFIG": "", **settings}.items():
            monkeypatch.setenv(name, value)

    def run(self, program: str, *arguments: str) -> Ended:
        self._patch.setattr(sys, "argv", [program, *arguments])
        with pytest.raises(SystemExit) as ended:
            _MAINS[program]()
        out, err = self._captured.readouterr()
        return Ended(int(ended.value.code or 0), out, err)


def _settings_of_the_environment() -> list[str]:
    return [name for name in os.environ if name.startswith(("RELAY_", "KUBELET_"))]


# --- What tests give the relay's commands, and what they look at in the files that those write.


CSR = make_csr(key_named("the node"), NODE_ID)
RUN = ["run", "--broker", "127.0.0.1:1", "--listen", f"127.0.0.1:{FREE_PORT}"]


def mode(path: Path) -> int:
    """Return the permissions of the file."""
    return stat.S_IMODE(path.stat().st_mode)


def written_ms(path: Path) -> int:
    """Return when the file was written, in ms since the epoch."""
    return path.stat().st_mtime_ns // 1_000_000


# --- A user who has no home directory, as in a container that runs as an arbitrary user.


def without_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process one of such a user, who is not root."""

    def no_entry(uid: int) -> NoReturn:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    monkeypatch.setattr(os, "getuid", lambda: 1000)


# --- A file of another user: by ``chown`` where the tests run as root, else by another effective user id.


OTHER_OWNER = 54_321
"""A user that is neither this one nor root."""


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``path`` belong to another user than the one that runs."""
    if os.geteuid() == 0:
        os.chown(path, OTHER_OWNER, OTHER_OWNER)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: OTHER_OWNER)
