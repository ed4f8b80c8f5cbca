import asyncio
import os
import resource
from pathlib import Path

import pytest

from schemas.process.resources import Uptime, raise_open_files_limit, resources, watchdog_s


def test_a_process_shows_what_it_uses() -> None:
    loop = asyncio.new_event_loop()
    used = resources(loop)
    with Path(os.devnull).open("rb"):
        more = resources(loop)
    loop.close()
    assert more["open_files"] == used["open_files"] + 1
    assert used["pid"] == os.getpid()
    assert used["max_open_files"] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert 1 << 20 < used["resident_bytes"] < 1 << 34


async def test_a_task_counts_until_it_has_ended_and_another_thread_can_ask() -> None:
    loop = asyncio.get_running_loop()
    used = await asyncio.to_thread(resources, loop)
    waiting = asyncio.create_task(asyncio.Event().wait())
    assert resources(loop)["tasks"] == used["tasks"] + 1
    waiting.cancel()
    await asyncio.wait({waiting})
    assert resources(loop)["tasks"] == used["tasks"]


def test_the_limit_of_open_files_is_raised_as_far_as_it_may_be() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        assert raise_open_files_limit() == hard
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


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
