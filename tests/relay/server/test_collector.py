import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration

_LOOK = """
import gc
from relay.server.serving import tune_collector

before = gc.get_threshold()
tune_collector()
larger = all(now > then for now, then in zip(gc.get_threshold(), before))
print(larger, gc.get_freeze_count() > 0, gc.isenabled())
"""


def test_the_collector_looks_less_often_and_not_at_what_is_there() -> None:
    command = [sys.executable, "-P", "-c", _LOOK]
    shown = subprocess.run(command, capture_output=True, check=True, text=True, timeout=60).stdout
    assert shown.split() == ["True", "True", "True"]
