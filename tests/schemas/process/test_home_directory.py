from pathlib import Path

import pytest

from schemas.error_roots import OperatorError
from schemas.process.home_directory import home_directory, needed_home_directory
from tests.fakes.homeless import without_home


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
