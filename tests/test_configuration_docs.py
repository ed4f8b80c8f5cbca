"""docs/configuration.md has the settings of both programs, as their tables say."""

import re
from pathlib import Path

import pytest

from kubelet.settings import KUBELET
from relay.settings.table import RELAY
from schemas.settings import Program

DOCUMENT = Path(__file__).parents[1] / "docs" / "configuration.md"


def rows(program: Program) -> list[str]:
    """Return a row of the document for each setting of ``program``."""
    found = []
    for setting in program.table:
        default = "" if setting.default is None else f"`{setting.default}`"
        form = setting.metavar.replace("|", "\\|") if setting.form.value != "flag" else "true or false"
        reloads = "yes" if setting.reloads else ""
        found.append(f"| `{setting.name}` | {form} | {default} | {reloads} | {setting.doc} |")
    return found


@pytest.mark.parametrize(("heading", "program"), [("The relay", RELAY), ("The node", KUBELET)])
def test_the_document_has_every_setting_as_the_table_says(heading: str, program: Program) -> None:
    section = DOCUMENT.read_text("utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    assert re.findall(r"^\| `.*", section, re.MULTILINE) == rows(program)
