import gc
import os
from collections.abc import Iterator
from itertools import islice

import pytest

from schemas.addresses import BrokerAddress
from tests.fakes.broker import KINDS, Broker, missing
from tests.fakes.examples import register_profiles

STARTERS = {"broker_kind", "demo", "system", "extended", "npm"}
"""The fixtures that start programs, or are the root of one that does."""

register_profiles()


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return two workers a core, as most tests wait more than they work; ``logical``: one more than cores."""
    cores = len(os.sched_getaffinity(0))
    return cores + 1 if config.option.numprocesses == "logical" else 2 * cores


def pytest_collection_finish() -> None:
    """Leave what was collected out of every later garbage collection: it lives as long as the process."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts a broker or a whole system, and let every worker begin with what takes long."""
    for item in items:
        if isinstance(item, pytest.Function) and STARTERS & set(item.fixturenames):
            item.add_marker(pytest.mark.processes)
    items[:] = _long_ones_first(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def _long_ones_first(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Return ``items`` with the modules of long tests at the head of each worker's share, an equal part.

    Otherwise the longest begin last, and all workers but one have nothing to do. The rest of a share can be
    taken over by another worker.
    """
    long_modules = {item.path for item in items if item.get_closest_marker("long")}
    modules = [[item for item in items if item.path == path] for path in sorted(long_modules, reverse=True)]
    rest = iter([item for item in items if item.path not in long_modules])
    share, ordered = -(-len(items) // workers), list[pytest.Item]()
    for worker in range(workers):
        ordered += [item for module in modules[worker::workers] for item in module]
        ordered += islice(rest, max(0, (worker + 1) * share - len(ordered)))
    return [*ordered, *rest]


@pytest.fixture(params=KINDS)
def broker_kind(request: pytest.FixtureRequest) -> str:
    """Each kind of broker in turn; without it a test is skipped, but in CI that is a failure."""
    kind = str(request.param)
    if reason := missing(kind):
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return kind


@pytest.fixture
def stoppable_broker(broker_kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker of this test's own that it stops and starts; it runs at first, and is empty."""
    own = Broker(broker_kind, tmp_path_factory.mktemp("broker"))
    own.start()
    try:
        yield own
    finally:
        own.stop()


@pytest.fixture
def broker(stoppable_broker: Broker) -> BrokerAddress:
    """The address of a broker of this test's own, empty at first."""
    return stoppable_broker.address
