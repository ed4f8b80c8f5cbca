"""The tests of a file by name, for the documents that name tests as evidence."""

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
_TEST = re.compile(r"^(?:async )?def (test_\w+)\(", re.MULTILINE)


@cache
def named_tests(file: str) -> frozenset[str]:
    """Return the names of the tests in ``file``, a path below the root; none if it does not exist."""
    path = ROOT / file
    return frozenset(_TEST.findall(path.read_text("utf-8"))) if path.is_file() else frozenset()
