"""The checks that both programs' ``doctor`` make. Must not print, and must not know which program it is."""

import http.client
import queue
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from schemas.addresses import BrokerAddress, host_of, port_of
from schemas.error_roots import PeerError
from schemas.faults import connection_reason
from schemas.files import check_secret
from schemas.process.doctor import Finding
from schemas.process.status_view import AskedProcess, Status, days_text
from schemas.settings import Given, Program, Setting, Settings

TIMEOUT_S = 5.0
CLOCK_WARNING_S = 30
CLOCK_FAILURE_S = 240
_FREE_FILES = 64


class UnreachedError(PeerError):
    """The relay was not reached; the text says why."""


@dataclass(frozen=True, slots=True)
class HealthAnswer:
    """The relay's answer to ``GET /healthz``: its status, and its time in milliseconds, if known."""

    status: int
    date_ms: int | None


def ask_health(url: str, tls: Callable[[], ssl.SSLContext | None], at: str | None = None) -> HealthAnswer:
    """Ask the relay with the public URL ``url`` for its health; ``tls`` returns what it is verified by.

    ``at``: the URL at which it is reached, where that is another one.

    Raises:
        UnreachedError: there is no answer.
    """
    at = at or url
    context = tls()
    connection = http.client.HTTPConnection(host_of(at), port_of(at), timeout=TIMEOUT_S)
    try:
        connection.connect()
        if context is not None:
            connection.sock = context.wrap_socket(connection.sock, server_hostname=host_of(url))
        connection.request("GET", "/healthz", headers={"Host": urlsplit(url).netloc})
        answer = connection.getresponse()  # its body says no more
        date = answer.getheader("Date")
    except ssl.SSLCertVerificationError as error:
        raise UnreachedError(
            f"{at} shows a certificate that is not trusted: {error.verify_message}"
        ) from None
    except (OSError, http.client.HTTPException) as error:
        raise UnreachedError(f"{at} is not reached: {connection_reason(error)}") from None
    finally:
        connection.close()
    try:
        date_ms = int(parsedate_to_datetime(date or "").timestamp() * 1000)
    except (ValueError, OverflowError):
        date_ms = None
    return HealthAnswer(answer.status, date_ms)


def process(asked: AskedProcess, expected: Settings) -> Finding:
    """Judge whether the process runs, and with the settings ``expected``: those that a start would give it.

    Raises:
        NotRunningError, StalledError, OSError: it does not, or does not answer.
    """
    if isinstance(asked.answer, Exception):
        raise asked.answer
    sources = asked.sources()
    if sources is None:
        return Finding.warning("it is of a version that does not tell its settings", "restart it")
    running, program = sources.settings(), asked.program
    differing = [each for each in expected.table if running.get(each) != expected.get(each)]
    by_start = [each for each in differing if _is_of_the_start(running.given.get(each.name), each, program)]
    changed = [each for each in differing if each not in by_start]
    if changed:
        found = ", ".join(f"{each.name} ({expected.source(each)})" for each in changed)
        return Finding.warning(
            f"settings that are not in effect: {found}", "restart it; docs/configuration.md has which reload"
        )
    found = ", ".join(running.source(each) for each in by_start)
    if by_start and asked.status["watchdog_s"] is None:
        return Finding.good(
            f"it runs with {found}", f"a service would not: write them into {program.usual_file} before"
        )
    return Finding.good(f"it runs with {found}, as its service starts it" if found else "it runs")


def _is_of_the_start(given: Given | None, setting: Setting[Any], program: Program) -> bool:
    """Return whether a value is that of an option or a variable, which only who starts the process gives."""
    return given is not None and given.source in {setting.flag, setting.variable(program.prefix)}


def reach(answer: HealthAnswer, url: str) -> Finding:
    """Judge whether the relay answers."""
    if answer.status == http.client.OK:
        return Finding.good(f"{url} answers")
    stalled = answer.status == http.client.SERVICE_UNAVAILABLE
    fix = "run `relay doctor` on the hub" if stalled else "check the URL"
    return Finding.failure(f"{url} answers with status {answer.status}", fix)


def clock(ahead_ms: int) -> Finding:
    """Judge a clock that is ``ahead_ms`` ahead of another, which is known to the second."""
    seconds = round(ahead_ms / 1000)
    found = f"{abs(seconds)} s {'ahead of' if seconds > 0 else 'behind'} the relay's"
    fix = "set it, or enable NTP: timedatectl set-ntp true"
    if abs(seconds) > CLOCK_FAILURE_S:
        return Finding.failure(found, fix)
    return Finding.warning(found, fix) if abs(seconds) > CLOCK_WARNING_S else Finding.good(found)


def keys(files: Sequence[Path]) -> Finding:
    """Judge the owner and the rights of files with keys; those that do not exist are left out.

    Raises:
        OSError: one is readable by others, or is another user's; the text says what to do.
    """
    there = [file for file in files if file.exists()]
    for file in there:
        check_secret(file)
    return Finding.good(f"{len(there)} files with keys are readable by their user alone")


def life(name: str, begin_ms: int, end_ms: int, now_ms: int, fix: str) -> Finding:
    """Judge how long a certificate is still valid, against the whole of its life."""
    left_ms = end_ms - now_ms
    if left_ms <= 0:
        return Finding.failure(f"{name} ended {days_text(-left_ms)} ago", fix)
    if now_ms < begin_ms:
        return Finding.failure(f"{name} begins in {days_text(begin_ms - now_ms)}", "set the clock")
    if left_ms < (end_ms - begin_ms) // 6:
        return Finding.warning(f"{name} ends in {days_text(left_ms)}", fix)
    return Finding.good(f"{name} ends in {days_text(left_ms)}")


def files(status: Status) -> Finding:
    """Judge how many file descriptors the process has left."""
    used, most = status["open_files"], status["max_open_files"]
    found = f"{used} of {most} file descriptors in use"
    if most - used < _FREE_FILES:
        return Finding.failure(found, "raise LimitNOFILE in the unit, or `ulimit -n`")
    if used > most * 0.8:
        return Finding.warning(found, "raise LimitNOFILE in the unit, or `ulimit -n`")
    return Finding.good(found)


def watchdog(status: Status) -> Finding:
    """Judge whether a service manager restarts the process when it stalls, and whether it does."""
    dead = [name for name, health in status["subsystems"].items() if not health["live"]]
    if dead:
        return Finding.failure(f"no progress in {', '.join(dead)}", "restart it, and report its log")
    if status["watchdog_s"] is None:
        return Finding.good("it makes progress", "as a service, it would be restarted if it stalled")
    return Finding.good(f"restarted when it makes no progress for {status['watchdog_s']:g} s")


if TYPE_CHECKING:
    from paho.mqtt.reasoncodes import ReasonCode

_KEEPALIVE_S = 30
_T = TypeVar("_T")
_VERSIONS = (MQTTProtocolVersion.MQTTv5, MQTTProtocolVersion.MQTTv311)


class BrokerProbeError(PeerError):
    """The broker was not reached, or refuses; the text says what."""


@dataclass(frozen=True, slots=True)
class Publication:
    """What is published: its topic, its payload, and whether the broker is to retain it."""

    topic: str
    payload: bytes
    retain: bool = False


class BrokerProbe:
    """A connection that speaks the newest version of MQTT that the broker does.

    Attributes:
        tells_refusals: whether the broker says when it refuses a publication.
    """

    def __init__(self, client: paho.Client, *, tells_refusals: bool, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self.tells_refusals = tells_refusals

    def publish(self, message: Publication) -> None:
        """Publish ``message``, and wait for the broker's confirmation.

        Raises:
            BrokerProbeError: it refuses, or does not confirm.
        """
        confirmed: queue.Queue[ReasonCode] = queue.Queue()
        self._client.on_publish = lambda _c, _d, _mid, code, _properties: confirmed.put(code)
        self._client.publish(message.topic, message.payload, qos=1, retain=message.retain)
        code = _taken(confirmed, self._timeout_s, "the broker does not confirm what is published")
        if code.is_failure:
            raise BrokerProbeError(f"the broker refuses what is published on {message.topic}: {code}")

    def try_to_publish(self, message: Publication) -> None:
        """Publish ``message``, whatever the broker says of it."""
        try:
            self.publish(message)
        except BrokerProbeError:
            return

    def subscribe(self, topic: str) -> "queue.Queue[str]":
        """Subscribe to ``topic``; return where the topics arrive on which something is published.

        Raises:
            BrokerProbeError: it refuses, or does not answer.
        """
        arrived: queue.Queue[str] = queue.Queue()
        granted: queue.Queue[list[ReasonCode]] = queue.Queue()
        self._client.on_message = lambda _c, _d, message: arrived.put(message.topic)
        self._client.on_subscribe = lambda _c, _d, _mid, codes, _properties: granted.put(codes)
        self._client.subscribe(topic, qos=1)
        for code in _taken(granted, self._timeout_s, "the broker does not answer the subscription"):
            if code.is_failure:
                raise BrokerProbeError(f"the broker refuses the subscription to {topic}: {code}")
        return arrived


@contextmanager
def probing(
    broker: BrokerAddress,
    client_id: str,
    tls: Callable[[], ssl.SSLContext | None],
    timeout_s: float = TIMEOUT_S,
    *,
    tries_mqtt_5: bool = True,
) -> Iterator[BrokerProbe]:
    """Hold a connection to ``broker``.

    ``tries_mqtt_5``: not at a broker that is known to speak 3.1.1 alone, whose log the attempt would be in.

    Raises:
        BrokerProbeError: it is not reached, or refuses the connection.
    """
    refusal = ""
    for version in _VERSIONS if tries_mqtt_5 else _VERSIONS[1:]:
        client = paho.Client(CallbackAPIVersion.VERSION2, client_id=client_id, protocol=version)
        if (context := tls()) is not None:
            client.tls_set_context(context)
        try:
            _connect(client, broker, timeout_s)
            yield BrokerProbe(client, tells_refusals=version is _VERSIONS[0], timeout_s=timeout_s)
        except _RefusedError as error:
            refusal = str(error)
            continue
        finally:
            client.disconnect()
            client.loop_stop()
        return
    raise BrokerProbeError(f"{broker} refuses the connection: {refusal}")


class _RefusedError(PeerError):
    """This version of MQTT, or this client, is refused."""


def _connect(client: paho.Client, broker: BrokerAddress, timeout_s: float) -> None:
    answered: queue.Queue[str | None] = queue.Queue()
    client.on_connect = lambda _c, _d, _f, code, _p: answered.put(str(code) if code.is_failure else None)
    client.on_disconnect = lambda _c, _d, _f, code, _p: answered.put(str(code))
    client.connect_timeout = timeout_s
    try:
        client.connect(broker.host, broker.port, _KEEPALIVE_S)
    except OSError as error:
        raise BrokerProbeError(f"{broker} is not reached: {error.strerror or error}") from None
    client.loop_start()
    refusal = _taken(answered, timeout_s, f"{broker} does not answer")
    if refusal is not None:
        raise _RefusedError(refusal)


def _taken(arrived: "queue.Queue[_T]", timeout_s: float, otherwise: str) -> _T:
    try:
        return arrived.get(timeout=timeout_s)
    except queue.Empty:
        raise BrokerProbeError(otherwise) from None
