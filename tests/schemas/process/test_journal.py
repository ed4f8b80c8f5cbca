import io
import os
from pathlib import Path

import pytest

from schemas.process.journal import is_journal, with_priority


def test_the_stream_that_systemd_names_is_the_journal_and_no_other(tmp_path: Path) -> None:
    with (tmp_path / "one").open("w") as one, (tmp_path / "other").open("w") as other:
        facts = os.fstat(one.fileno())
        environment = {"JOURNAL_STREAM": f"{facts.st_dev}:{facts.st_ino}"}
        assert (is_journal(one, environment), is_journal(other, environment)) == (True, False)
        assert not is_journal(one, {})
    assert not is_journal(one, environment)  # closed
    assert not is_journal(io.StringIO(), environment)


@pytest.mark.parametrize(
    ("level", "number"), [("info", 6), ("warning", 4), ("error", 3), ("critical", 2), ("another", 6)]
)
def test_a_line_begins_with_its_priority(level: str, number: int) -> None:
    assert with_priority(level, '{"event": "x"}') == f'<{number}>{{"event": "x"}}'
