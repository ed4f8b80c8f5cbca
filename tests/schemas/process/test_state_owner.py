"""Root as the owner of a state directory, in a process of its own: what it gives up is not given back."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from schemas.error_roots import OperatorError
from schemas.process.state_owner import home_directory, needed_home_directory, usual_directory
from tests.fakes.command_lines import without_home

SERVICE = 54_321
BOUND_S = 60
BEGIN = """
import os, sys
from pathlib import Path
from schemas.process.state_owner import act_as_owner_of, as_operator
state, operators = map(Path, sys.argv[1:])
"""

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    directory = tmp_path / "state"
    directory.mkdir(mode=0o750)
    os.chown(directory, SERVICE, SERVICE)
    tmp_path.chmod(0o755)
    for above in tmp_path.parents:
        if not above.stat().st_mode & 0o001:
            above.chmod(0o711)  # pytest's own, which only root made and enters
    return directory


@pytest.fixture
def operators(tmp_path: Path) -> Path:
    directory = tmp_path / "operator"
    directory.mkdir(mode=0o700)
    return directory


def ran(lines: str, *places: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-c", BEGIN + lines, *map(str, places)]
    return subprocess.run(command, capture_output=True, text=True, timeout=BOUND_S, check=False)


@as_root
@pytest.mark.integration
def test_root_goes_on_as_the_owner_and_reads_and_writes_what_the_operator_named_as_itself(
    state: Path, operators: Path
) -> None:
    lines = """
act_as_owner_of(state)
(state / "ledger").write_text("kept")
try:
    (operators / "out").write_text("through the owner's rights")
except PermissionError:
    with as_operator():
        (operators / "out").write_text("the operator's")
(state / "second").write_text("kept")
"""
    done = ran(lines, state, operators)
    assert done.returncode == 0, done.stderr
    assert {(state / name).stat().st_uid for name in ("ledger", "second")} == {SERVICE}
    assert (operators / "out").stat().st_uid == 0
    assert (operators / "out").read_text() == "the operator's"


@as_root
@pytest.mark.integration
def test_a_link_of_the_owner_leads_root_nowhere(state: Path, operators: Path) -> None:
    (state / "ca").symlink_to(operators)
    done = ran("act_as_owner_of(state)\n(state / 'ca/root.key').write_text('x')", state, operators)
    assert "PermissionError" in done.stderr
    assert not list(operators.iterdir())


@as_root
@pytest.mark.integration
def test_a_daemon_of_root_cannot_become_root_again(state: Path, operators: Path) -> None:
    lines = "act_as_owner_of(state, for_good=True)\nprint(os.getresuid())\nos.seteuid(0)"
    done = ran(lines, state, operators)
    assert done.stdout == f"{(SERVICE,) * 3}\n"
    assert "PermissionError" in done.stderr


@as_root
@pytest.mark.integration
def test_in_a_directory_of_its_own_root_stays_root(operators: Path) -> None:
    lines = "act_as_owner_of(operators)\nact_as_owner_of(operators / 'none')\nprint(os.geteuid())"
    assert ran(lines, operators, operators).stdout == "0\n"


@as_root
@pytest.mark.integration
@pytest.mark.parametrize("place", ["none", "roots", "link", "link/none"])
def test_root_goes_on_as_the_user_who_could_exchange_the_directory(
    state: Path, operators: Path, place: str
) -> None:
    (state / "roots").mkdir()
    (state / "link").symlink_to(operators)
    os.chown(state / "link", SERVICE, SERVICE, follow_symlinks=False)
    lines = f"act_as_owner_of(state / {place!r})\nprint(os.geteuid(), os.getegid(), os.getgroups())"
    assert ran(lines, state, operators).stdout == f"{SERVICE} {SERVICE} [{SERVICE}]\n"


def test_who_is_not_root_has_a_directory_of_its_own_unless_it_may_use_the_services(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, own, absent = tmp_path / "service", tmp_path / "own", tmp_path / "absent"
    service.mkdir()
    own.mkdir()
    user = service.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: 0)
    assert usual_directory(service, own) == service
    monkeypatch.setattr(os, "getuid", lambda: user or 1000)
    os.chown(service, user or 1000, -1)
    assert usual_directory(service, own) == service
    monkeypatch.setattr(os, "getuid", lambda: 1001)
    assert usual_directory(service, own) == own
    assert usual_directory(service, tmp_path / "unmade") == service
    assert usual_directory(absent, tmp_path / "unmade") == tmp_path / "unmade"
    assert usual_directory(absent, None) is None


def test_the_home_directory_is_that_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert home_directory() == needed_home_directory() == tmp_path


def test_a_user_without_one_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    without_home(monkeypatch)
    assert home_directory() is None
    with pytest.raises(OperatorError, match="set HOME: this user has no home directory"):
        needed_home_directory()
