from pathlib import Path

import pytest

from kubelet.cli.output import EnrolledPlace
from kubelet.config import SERVICE_STATE_DIR

HOME = Path("/home/ada/.local/state/edge-kubelet")


def machine(root: Path, *, systemd: bool, unit: str | None) -> Path:
    if systemd:
        (root / "run/systemd/system").mkdir(parents=True)
    if unit is not None:
        (root / unit).mkdir(parents=True)
        (root / unit / "edge-kubelet.service").touch()
    return root


@pytest.mark.parametrize("unit", ["etc/systemd/system", "usr/lib/systemd/system"])
def test_a_service_that_is_installed_is_started(tmp_path: Path, unit: str) -> None:
    root = machine(tmp_path, systemd=True, unit=unit)
    place = EnrolledPlace(SERVICE_STATE_DIR, SERVICE_STATE_DIR, root)
    assert place.next_step() == "systemctl enable --now edge-kubelet"


def test_a_service_that_is_not_installed_is_installed_first(tmp_path: Path) -> None:
    root = machine(tmp_path, systemd=True, unit=None)
    place = EnrolledPlace(SERVICE_STATE_DIR, SERVICE_STATE_DIR, root)
    assert place.next_step().startswith("edge-kubelet service install, and then: ")


def test_without_systemd_the_daemon_is_run(tmp_path: Path) -> None:
    root = machine(tmp_path, systemd=False, unit="etc/systemd/system")
    assert EnrolledPlace(SERVICE_STATE_DIR, SERVICE_STATE_DIR, root).next_step() == "edge-kubelet run"


def test_a_state_that_no_service_uses_is_run_by_hand(tmp_path: Path) -> None:
    root = machine(tmp_path, systemd=True, unit="etc/systemd/system")
    assert EnrolledPlace(HOME, HOME, root).next_step() == "edge-kubelet run"
    assert EnrolledPlace(HOME, None, root).next_step() == f"edge-kubelet run --state-dir {HOME}"
    other = EnrolledPlace(Path("/srv/my node"), HOME, root)
    assert other.next_step() == "edge-kubelet run --state-dir '/srv/my node'"
