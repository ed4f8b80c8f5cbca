"""What to do after an enrolment, on this very machine. Must not do it."""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from kubelet.config import SERVICE_STATE_DIR

_UNIT = "edge-kubelet.service"
_UNIT_DIRECTORIES = ("etc/systemd/system", "usr/lib/systemd/system", "lib/systemd/system")
_SYSTEMD_RUNS = "run/systemd/system"
"""sd_booted(3)."""


@dataclass(frozen=True, slots=True)
class EnrolledPlace:
    """Where a node was enrolled. ``root`` stands for the root of the file system.

    Attributes:
        usual: the state directory that `kubelet run` uses for this user unless another is named; None if it
            has to be.
    """

    state_dir: Path
    usual: Path | None
    root: Path = Path("/")

    @classmethod
    def here(cls, state_dir: Path, usual: Path | None) -> "EnrolledPlace":
        """Return the place on this machine."""
        return cls(Path(os.path.abspath(state_dir)), usual)  # noqa: PTH100 - links stay as they are named

    def next_step(self) -> str:
        """Return the command that lets the node run: its service where there is one, else the daemon."""
        if self.state_dir == SERVICE_STATE_DIR and (self.root / _SYSTEMD_RUNS).is_dir():
            if any((self.root / directory / _UNIT).exists() for directory in _UNIT_DIRECTORIES):
                return "systemctl enable --now edge-kubelet"
            return "edge-kubelet service install, and then: systemctl enable --now edge-kubelet"
        if self.state_dir == self.usual:
            return "edge-kubelet run"
        return f"edge-kubelet run --state-dir {shlex.quote(str(self.state_dir))}"
