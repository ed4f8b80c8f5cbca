import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from schemas.addresses import BrokerAddress
from schemas.files import ExposedFileError
from schemas.process import common_checks
from schemas.process.common_checks import (
    BrokerProbeError,
    HealthAnswer,
    Publication,
    UnreachedError,
    ask_health,
    probing,
)
from schemas.process.doctor import Finding, Severity
from schemas.process.status_socket import NotRunningError
from schemas.process.status_view import AskedProcess
from schemas.settings import Form, Given, Program, Setting, Settings, parse_path, whole_number
from tests.fakes.broker import Broker
from tests.fakes.ports import unused_port
from tests.fakes.signer import NODE_ID

DAY_MS = 86_400_000
UP = {"started": True, "live": True, "ready": True}
LIVE: dict[str, Any] = {
    "open_files": 10,
    "max_open_files": 1024,
    "watchdog_s": 30.0,
    "subsystems": {"relay": UP},
}
_, OK, WARNING, FAILURE = Severity


@asynccontextmanager
async def answering(text: bytes) -> AsyncIterator[str]:
    """Serve ``text`` to every client; yield the URL."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(text)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def asked(url: str, tls: Callable[[], ssl.SSLContext | None] = lambda: None) -> HealthAnswer:
    return await asyncio.to_thread(ask_health, url, tls)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (b"200 OK\r\nDate: Sat, 22 Nov 2025 10:00:00 GMT\r\n", HealthAnswer(200, 1_763_805_600_000)),
        (b"200 OK\r\nDate: yesterday\r\n", HealthAnswer(200, None)),
        (b"200 OK\r\nDate: Fri, 01 Jan 99999999999999999999 00:00:00 GMT\r\n", HealthAnswer(200, None)),
        (b"503 Service Unavailable\r\n", HealthAnswer(503, None)),
    ],
)
async def test_the_relay_is_asked_for_its_health_and_its_time(head: bytes, expected: HealthAnswer) -> None:
    async with answering(b"HTTP/1.1 " + head + b"Content-Length: 0\r\n\r\n") as url:
        assert await asked(url) == expected


@pytest.mark.integration
async def test_a_relay_that_is_not_reached_or_speaks_something_else_is_named() -> None:
    async with answering(b"SSH-2.0\r\n") as url:
        with pytest.raises(UnreachedError, match="is not reached"):
            await asked(url)
    with pytest.raises(UnreachedError, match="is not reached"):
        await asked(url)
    async with answering(b"HTTP/1.1 200 OK\r\n\r\n") as url:
        with pytest.raises(UnreachedError, match="is not reached"):
            await asked(url.replace("http", "https"), ssl.create_default_context)


@pytest.mark.parametrize(("status", "severity"), [(200, OK), (503, FAILURE), (404, FAILURE)])
def test_only_a_good_answer_is_a_relay(status: int, severity: Severity) -> None:
    assert common_checks.reach(HealthAnswer(status, None), "url").severity is severity


@pytest.mark.parametrize(
    ("ahead_ms", "severity", "found"),
    [
        (0, OK, "0 s behind"),
        (30_000, OK, "30 s ahead of"),
        (-31_000, WARNING, "31 s behind"),
        (240_000, WARNING, "240 s ahead of"),
        (-241_000, FAILURE, "241 s behind"),
    ],
)
def test_a_clock_is_judged_by_what_the_relay_tolerates(ahead_ms: int, severity: Severity, found: str) -> None:
    finding = common_checks.clock(ahead_ms)
    assert (finding.severity, found in finding.found) == (severity, True)


def test_keys_are_for_their_user_alone(tmp_path: Path) -> None:
    key, absent = tmp_path / "key", tmp_path / "absent"
    key.write_text("secret")
    key.chmod(0o600)
    assert common_checks.keys([key, absent]).found.startswith("1 files")
    key.chmod(0o640)
    with pytest.raises(ExposedFileError, match="chmod 600"):
        common_checks.keys([key])


@pytest.mark.parametrize(
    ("now_ms", "severity", "found"),
    [
        (0, OK, "ends in 60 days"),
        (50 * DAY_MS, OK, "ends in 10 days"),
        (50 * DAY_MS + 1, WARNING, "ends in 9 days"),
        (62 * DAY_MS, FAILURE, "ended 2 days ago"),
        (-3 * DAY_MS, FAILURE, "begins in 3 days"),
    ],
)
def test_a_certificate_is_judged_by_what_is_left_of_its_life(
    now_ms: int, severity: Severity, found: str
) -> None:
    finding = common_checks.life("the leaf", 0, 60 * DAY_MS, now_ms, "renew it")
    assert (finding.severity, finding.found) == (severity, f"the leaf {found}")


NAME = Setting("name", str, "A name.", default="ant")
PORT = Setting("port", whole_number(1, 9), "A port.", "PORT", "1", Form.NUMBER)
PROGRAM = Program("relay", (Setting("state_dir", parse_path, "A directory."), NAME, PORT))


def judged(running: dict[str, Given], expected: dict[str, Given], watchdog_s: float | None) -> Finding:
    """Return what is found of a process that runs with ``running`` where a start would give ``expected``."""
    here = {"state_dir": Given("/state", "default")}
    serialized = Settings(PROGRAM.table, [here, running]).serialized()
    asked = AskedProcess(PROGRAM, Path("/state"), {"settings": serialized, "watchdog_s": watchdog_s})
    return common_checks.process(asked, Settings(PROGRAM.table, [here, expected]))


def test_a_process_runs_with_the_settings_that_a_start_would_give_it() -> None:
    assert judged({}, {}, None) == Finding.good("it runs")
    # Compared by its value: a variable may say what the file says.
    same = judged({"port": Given("2", "RELAY_PORT")}, {"port": Given("02", "relay.toml, line 1")}, None)
    assert same == Finding.good("it runs")


def test_options_that_a_service_would_not_have_are_named_where_no_service_gives_them() -> None:
    options = {"name": Given("bee", "--name"), "port": Given("2", "RELAY_PORT")}
    lost = judged(options, {}, None)
    fix = "a service would not: write them into /etc/edge-kubelet/relay.toml before"
    assert lost == Finding.good("it runs with --name, RELAY_PORT", fix)
    of_its_unit = judged(options, {}, 60.0)
    assert of_its_unit == Finding.good("it runs with --name, RELAY_PORT, as its service starts it")


def test_settings_that_were_changed_since_the_start_are_named() -> None:
    before, after = {"name": Given("bee", "a.toml, line 1")}, {"port": Given("2", "a.toml, line 2")}
    finding = judged(before, after, 60.0)
    assert finding.severity is WARNING
    assert finding.found == "settings that are not in effect: name (default), port (a.toml, line 2)"


def test_a_process_that_tells_no_settings_or_nothing_is_found() -> None:
    settings = Settings(PROGRAM.table, [])
    older = AskedProcess(PROGRAM, Path("/state"), {"watchdog_s": None})
    assert common_checks.process(older, settings).severity is WARNING
    gone = AskedProcess(PROGRAM, Path("/state"), NotRunningError("nothing runs"))
    with pytest.raises(NotRunningError):
        common_checks.process(gone, settings)


@pytest.mark.parametrize(("used", "severity"), [(10, OK), (850, WARNING), (961, FAILURE)])
def test_file_descriptors_must_be_left(used: int, severity: Severity) -> None:
    assert common_checks.files(LIVE | {"open_files": used}).severity is severity


def test_the_watchdog_needs_progress_and_a_process_without_a_service_gets_a_hint() -> None:
    assert common_checks.watchdog(LIVE).fix == ""
    in_a_terminal = common_checks.watchdog(LIVE | {"watchdog_s": None})
    assert (in_a_terminal.severity, "as a service" in in_a_terminal.fix) == (OK, True)
    stalled = LIVE | {"subsystems": {"relay": {**UP, "live": False}}}
    finding = common_checks.watchdog(stalled)
    assert (finding.severity, finding.found) == (FAILURE, "no progress in relay")


pytestmark = pytest.mark.integration

MESSAGE = Publication(f"$devices/{NODE_ID}/identity", b"PEM", retain=True)
BOUND_S = 30


def plain() -> None:
    """Return the TLS context of a connection without TLS."""


@contextmanager
def refusing(
    kind: str, directory: Path, *, deaf: bool = False, mute: bool = False
) -> Iterator[BrokerAddress]:
    broker = Broker(kind, directory, deaf=deaf, mute=mute)
    broker.start()
    try:
        yield broker.address
    finally:
        broker.stop()


def test_a_broker_confirms_what_is_published_and_delivers_it(broker: BrokerAddress, broker_kind: str) -> None:
    with probing(broker, "probe", plain) as probe:
        arrived = probe.subscribe("$devices/+/identity")
        probe.publish(MESSAGE)
        assert arrived.get(timeout=BOUND_S) == MESSAGE.topic
        # nats-server speaks MQTT 3.1.1 alone.
        assert probe.tells_refusals is (broker_kind == "mosquitto")


def test_a_broker_of_mqtt_5_says_what_its_access_list_refuses(broker_kind: str, tmp_path: Path) -> None:
    with refusing(broker_kind, tmp_path, mute=True) as broker, probing(broker, "probe", plain) as probe:
        if not probe.tells_refusals:
            probe.publish(MESSAGE)  # confirmed, and not delivered: the relay says what it received
            return
        with pytest.raises(BrokerProbeError, match=r"refuses what is published .* Not authorized"):
            probe.publish(MESSAGE)
        probe.try_to_publish(MESSAGE)


def test_a_subscription_that_is_refused_is_no_success(broker_kind: str, tmp_path: Path) -> None:
    with (
        refusing(broker_kind, tmp_path, deaf=True) as broker,
        probing(broker, "probe", plain) as probe,
        pytest.raises(BrokerProbeError, match="refuses the subscription"),
    ):
        probe.subscribe("$devices/+/heartbeat")


def test_a_broker_that_is_not_there_is_named() -> None:
    unused = BrokerAddress("127.0.0.1", unused_port())
    with pytest.raises(BrokerProbeError, match=f"{unused} is not reached"), probing(unused, "probe", plain):
        raise AssertionError


def test_a_broker_that_says_nothing_is_not_waited_for_for_long(free_listener: Callable[[], int]) -> None:
    silent = BrokerAddress("127.0.0.1", free_listener())
    with (
        pytest.raises(BrokerProbeError, match="does not answer"),
        probing(silent, "probe", plain, timeout_s=0.2),
    ):
        raise AssertionError
