"""``previous.toml`` names the minor version before this one."""

import tomllib

from tests.compatibility.conftest import PREVIOUS, ROOT


def test_the_previous_version_is_the_minor_version_before_this_one() -> None:
    major, minor, _ = map(int, PREVIOUS["version"].split("."))
    this = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    assert this.startswith(f"{major}.{minor + 1}.")
