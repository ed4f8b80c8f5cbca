"""One daemon a state directory."""

import subprocess
import sys
from pathlib import Path

import pytest

from kubelet.process import held_alone
from schemas.files import UntrustedFileError
from schemas.identity_files import IdentityFilesError
from tests.fakes.owners import give_away

HOLD = "import sys; from pathlib import Path; from kubelet.process import held_alone\n"
HOLD += "with held_alone(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"


def test_a_second_holder_is_told_what_to_do(tmp_path: Path) -> None:
    with (
        held_alone(tmp_path),
        pytest.raises(IdentityFilesError, match="another kubelet runs with"),
        held_alone(tmp_path),
    ):
        pytest.fail("held twice")


def test_what_was_let_go_of_can_be_held_again(tmp_path: Path) -> None:
    for _ in range(2):
        with held_alone(tmp_path):
            pass
    assert [file.name for file in tmp_path.iterdir()] == ["lock"]


def test_a_link_in_the_place_of_the_lock_is_refused_and_its_target_is_not_emptied(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    (tmp_path / "lock").symlink_to(victim)
    with pytest.raises(UntrustedFileError, match="lock is a symbolic link"), held_alone(tmp_path):
        pytest.fail("held")
    assert victim.read_text() == "untouched"


def test_the_lock_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with held_alone(tmp_path):
        pass
    give_away(tmp_path / "lock", monkeypatch)
    with pytest.raises(UntrustedFileError, match="belongs to user"), held_alone(tmp_path):
        pytest.fail("held")


@pytest.mark.integration
def test_a_daemon_that_was_killed_holds_nothing(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-P", "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(IdentityFilesError), held_alone(tmp_path):
        pytest.fail("held twice")
    holder.kill()
    holder.communicate()
    with held_alone(tmp_path):
        pass
