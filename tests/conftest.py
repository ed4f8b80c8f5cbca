import gc
import os
import shutil
import signal
from collections.abc import Generator, Iterator
from functools import cache
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from schemas.addresses import BrokerAddress
from tests.fakes.broker import KINDS, Broker, missing
from tests.fakes.examples import register_profiles
from tests.fakes.signer import SimulatedCa

INTEGRATION_FIXTURES = {
    "broker_kind",
    "demo",
    "enrolment_server",
    "extended",
    "nats",
    "npm",
    "server",
    "system",
}
"""The fixtures that start programs or listen on ports, or are the root of one that does."""
TESTS = Path(__file__).parent
SINGLE_PARTS = ("schemas", "kubelet", "relay")
"""The directories of tests of single parts; in the others all are integration tests."""

IN_MEMORY = Path("/dev/shm")  # noqa: S108 - pytest makes a directory of its own below it
ENOUGH_BYTES = 4 * 1024**3

register_profiles()


def pytest_configure() -> None:
    """Keep what the tests write in memory, if that has room: most of them wait for a disk otherwise.

    Where a shell runs them in the background, or nohup does, they ignore Ctrl-C or the end of their terminal,
    and so would the programs that they start.
    """
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)
    if _takes_files(IN_MEMORY):
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(IN_MEMORY))


def _takes_files(directory: Path) -> bool:
    """Return whether ``directory`` has room, and lets the programs run that tests put there."""
    try:
        is_executable = not os.statvfs(directory).f_flag & os.ST_NOEXEC
        return is_executable and shutil.disk_usage(directory).free >= ENOUGH_BYTES
    except OSError:
        return False


def pytest_xdist_auto_num_workers() -> int:
    """Return two workers a core: most integration tests wait more than they compute."""
    return 2 * len(os.sched_getaffinity(0))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while the tests are collected: nothing of them is released."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Leave what was collected out of every later garbage collection: it lives as long as the process."""
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None, object, object]:
    """Mark integration tests by place, fixture or length, and let every worker begin with what takes long."""
    for item in items:
        is_long = item.get_closest_marker("long") is not None
        if is_long or not _is_of_single_parts(item.path.parent) or _has_integration_fixture(item):
            item.add_marker(pytest.mark.integration)
    result = yield
    # What is left once -m has chosen: a share is one of the tests that run.
    items[:] = _long_ones_first(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop() -> Generator[None, object, object]:
    """Let the machine trust one root: to read a real one's hundreds takes longer than most tests.

    A fixture would do so as well, but pytest looks at each fixture again before each test.
    """
    below = os.environ.get("PYTEST_DEBUG_TEMPROOT")
    with TemporaryDirectory(prefix="roots-", dir=below) as directory, pytest.MonkeyPatch.context() as patched:
        only_root = Path(directory) / "only.pem"
        only_root.write_text(SimulatedCa("the only root of the machine").root_pem)
        patched.setenv("SSL_CERT_FILE", str(only_root))
        patched.setenv("SSL_CERT_DIR", directory)
        return (yield)


@cache
def _is_of_single_parts(directory: Path) -> bool:
    return directory == TESTS or any(directory.is_relative_to(TESTS / part) for part in SINGLE_PARTS)


def _has_integration_fixture(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and not INTEGRATION_FIXTURES.isdisjoint(item.fixturenames)


def _long_ones_first(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Return ``items`` with what takes long at the head of each worker's share, an equal part.

    Otherwise the longest begin last, and all workers but one have nothing to do. The rest of a share can be
    taken over by another worker. Modules that share one demo stay together, so that one worker starts it.
    """
    demos = {item.path: item.path.parent for item in items if "demo" in getattr(item, "fixturenames", ())}
    units: dict[Path, list[pytest.Item]] = {}
    for item in items:
        units.setdefault(demos.get(item.path, item.path), []).append(item)
    long_modules = {item.path for item in items if item.get_closest_marker("long")}
    first = sorted({*demos.values(), *(demos.get(path, path) for path in long_modules)}, reverse=True)
    dealt = [units.pop(unit) for unit in first]
    rest = chain.from_iterable(units.values())
    share, ordered = -(-len(items) // workers), list[pytest.Item]()
    for worker in range(workers):
        ordered += [item for unit in dealt[worker::workers] for item in unit]
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


@pytest.fixture
def ended_handshakes() -> Iterator[None]:
    """For tests whose agents are cancelled at any moment, and which ignore the warnings of that.

    The HTTP library does not close a connection whose TLS handshake is cancelled. It is collected here, so
    that it is not found in another test.
    """
    yield
    gc.collect()
