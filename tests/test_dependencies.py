"""The bounds of dependencies: a lower one is what ``.ci/lowest`` runs, an upper one says what it is for."""

import re
import tomllib

import pytest

from tests.fakes.guide import ROOT

TEXT = (ROOT / "pyproject.toml").read_text("utf-8")
PROJECT = tomllib.loads(TEXT)["project"]
EXTRAS = {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
# The tools of `dev` are those of the lock.
OURS = sorted(
    {requirement for extra in EXTRAS.keys() - {"dev"} for requirement in EXTRAS[extra] if ">=" in requirement}
)
LOCK = (ROOT / "requirements-lowest.lock").read_text("utf-8")
LOCKED = dict(re.findall(r"^([\w-]+)==(\S+)", LOCK, re.MULTILINE))


@pytest.mark.parametrize("requirement", OURS)
def test_the_lower_bound_is_the_version_that_is_run(requirement: str) -> None:
    [(name, bound)] = re.findall(r"^([\w-]+)(?:\[\w+\])?>=([\d.]+)", requirement)
    assert f"{LOCKED[name]}.".startswith(f"{bound}.")


@pytest.mark.parametrize("requirement", OURS)
def test_the_upper_bound_or_that_there_is_none_has_a_reason(requirement: str) -> None:
    lines = [line for line in TEXT.splitlines() if f'"{requirement}"' in line]
    assert any("# " in line for line in lines)
    assert "<" in requirement or any("# none: " in line for line in lines)
