import os
import resource
from pathlib import Path

import pytest

from schemas.process.resources import Uptime, resources, watchdog_s


def test_a_process_shows_what_it_uses() -> None:
    used = resources()
    with Path(os.devnull).open("rb"):
        more = resources()
    assert more["open_files"] == used["open_files"] + 1
    assert used["pid"] == os.getpid()
    assert used["max_open_files"] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert 1 << 20 < used["resident_bytes"] < 1 << 34


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "x"}, None),
    ],
)
def test_the_watchdog_is_the_service_managers(environment: dict[str, str], seconds: float | None) -> None:
    assert watchdog_s(environment) == seconds


def test_uptime_counts_from_the_start() -> None:
    assert Uptime()() == 0
