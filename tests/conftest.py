import gc
import os
import re
import shutil
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
FIXTURES_ON_THEM = {"asker", "broker", "owner", "stoppable_broker"}
"""Those among the shared ones that need one of them."""

TESTS = Path(__file__).parent
SINGLE_PARTS = ("schemas", "kubelet", "relay")
"""The directories of tests of single parts; in the others all are integration tests."""

_ONLY_INTEGRATION = ("integration", "integration and not long")
"""What ``-m`` is given where no test of a single part runs."""
_NO_INTEGRATION = "not integration"
"""What it is given where only those run."""
_HOW_TO_BE_FOUND = "name its marker or its fixture in its file, or the fixture in tests/conftest.py"
_NAMES_INTEGRATION = re.compile(
    r"\bpytest\.mark\.(?:integration|long)\b"
    rf"|\b(?:{'|'.join(sorted(INTEGRATION_FIXTURES | FIXTURES_ON_THEM))})(?::|\"[,)])"
)
"""An integration test among those of a single part has one of these in its source."""
_ALL_ARE_INTEGRATION = re.compile(r"^pytestmark = .*\bpytest\.mark\.(?:integration|long)\b", re.MULTILINE)
"""A file of integration tests alone has this in its source."""

pytest_plugins = ["tests.size_rules"]

IN_MEMORY = Path("/dev/shm")  # noqa: S108 - pytest makes a directory of its own below it
ENOUGH_BYTES = 4 * 1024**3

register_profiles()


def pytest_configure() -> None:
    """Keep what the tests write in memory, if that has room: most of them wait for a disk otherwise."""
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


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Pass over files without a test of the kind that is asked for: to collect them takes seconds."""
    if not collection_path.name.startswith("test_"):
        return None
    asked = config.option.markexpr
    is_without = (asked in _ONLY_INTEGRATION and not _is_found(collection_path)) or (
        asked == _NO_INTEGRATION and _has_integration_alone(collection_path)
    )
    return True if is_without else None


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
        if item.get_closest_marker("integration") and not _is_found(item.path):
            raise pytest.UsageError(f"{item.nodeid}: `make test` would pass over it: {_HOW_TO_BE_FOUND}")
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


@cache
def _is_found(file: Path) -> bool:
    """Return whether integration tests are looked for in a file of tests."""
    is_of_others = not _is_of_single_parts(file.parent)
    return is_of_others or _NAMES_INTEGRATION.search(file.read_text("utf-8")) is not None


def _has_integration_alone(file: Path) -> bool:
    return _ALL_ARE_INTEGRATION.search(file.read_text("utf-8")) is not None


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
