"""The checks that both programs' ``doctor`` make. Must not print, and must not know which program it is."""

import http.client
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from schemas.addresses import host_of, port_of
from schemas.connection_faults import connection_reason
from schemas.error_roots import PeerError
from schemas.files import check_secret
from schemas.process.asked_process import AskedProcess
from schemas.process.doctor import Finding
from schemas.process.status_view import Status, days_text
from schemas.settings import Given, Setting, Settings
from schemas.settings_sources import Program

TIMEOUT_S = 5.0
CLOCK_WARNING_S = 30
CLOCK_FAILURE_S = 240
_FREE_FILES = 64
_MAX_BODY = 65536


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
        answer = connection.getresponse()
        answer.read(_MAX_BODY)
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
    except ValueError:
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
        return Finding.warning(
            f"started with {found}; a restart by the service would lose them",
            f"write them into {program.usual_file}",
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
        return Finding.warning(
            "no service manager restarts it when it stalls", "run it as a service, with WatchdogSec"
        )
    return Finding.good(f"restarted when it makes no progress for {status['watchdog_s']:g} s")
