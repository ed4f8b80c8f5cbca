import asyncio
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from schemas.process.doctor import NotCheckedError
from schemas.process.status_socket import NAME, served
from schemas.process.status_view import (
    AnotherVersionError,
    AskedProcess,
    StatusLines,
    days_text,
    outcomes_text,
    process_text,
    readiness_text,
    seconds_text,
    show,
)
from schemas.settings import Given, Program, Setting, parse_path
from tests.fakes.lines import Terminal

DAY_MS = 86_400_000
UP = {"started": True, "live": True, "ready": True}
STATUS: dict[str, Any] = {"ready": True, "count": 1, "subsystems": {"relay": UP}}
PROCESS = {
    "pid": 7,
    "uptime_s": 90,
    "resident_bytes": 3 << 20,
    "open_files": 4,
    "max_open_files": 10,
    "tasks": 5,
}


def lines_of(status: Mapping[str, Any]) -> StatusLines:
    return (("a", "text"), ("longer", f"{status['count']}\x1b[2J"))


@pytest.mark.parametrize("ready", [True, False])
def test_lines_are_aligned_and_hold_no_control_character(*, ready: bool) -> None:
    stream = io.StringIO()
    shown = show(lambda: STATUS | {"ready": ready}, lines_of, as_json=False, watch=False, stream=stream)
    assert shown is ready
    assert stream.getvalue() == "a       text\nlonger  1\\x1b[2J\n"


def test_json_is_one_object_a_line() -> None:
    stream = io.StringIO()
    show(lambda: STATUS, lines_of, as_json=True, watch=False, stream=stream)
    assert json.loads(stream.getvalue()) == STATUS
    assert stream.getvalue().count("\n") == 1


@pytest.mark.parametrize(("stream", "cleared"), [(Terminal(), True), (io.StringIO(), False)])
def test_a_watched_status_is_shown_again_until_it_is_interrupted(
    stream: io.StringIO, *, cleared: bool
) -> None:
    counts, pauses = iter([1, 2, 3]), []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        show(
            lambda: STATUS | {"count": next(counts)},
            lines_of,
            as_json=False,
            watch=True,
            stream=stream,
            sleep=sleep,
        )
    assert pauses == [2.0] * 3
    assert [f"longer  {count}" in stream.getvalue() for count in (1, 2, 3)] == [True] * 3
    assert ("\x1b[H" in stream.getvalue()) is cleared


@pytest.mark.parametrize(
    ("health", "text"),
    [
        ({**UP}, "yes"),
        ({**UP, "ready": False, "state": "connecting"}, "no; relay: connecting"),
        ({**UP, "live": False}, "no; relay: not ready"),
    ],
)
def test_what_keeps_calls_from_flowing_is_named(health: dict[str, Any], text: str) -> None:
    ready = health["ready"] and health["live"]
    assert readiness_text({"ready": ready, "subsystems": {"relay": health, "broker": UP}}) == text


@pytest.mark.parametrize(("watchdog_s", "text"), [(None, "no watchdog"), (30.0, "watchdog 30 s")])
def test_a_process_is_shown_with_what_it_uses(watchdog_s: float | None, text: str) -> None:
    shown = process_text({**PROCESS, "watchdog_s": watchdog_s})
    assert shown == f"pid 7, up 1m30s, 3.0 MiB, 4 of 10 files, 5 tasks, {text}"


def test_outcomes_are_counted_by_code_and_hop() -> None:
    ok, late = {"code": "ok", "hop": "", "count": 3}, {"code": "E_X", "hop": "node", "count": 1}
    assert outcomes_text([]) == "none yet"
    assert outcomes_text([ok, late]) == "3 ok, 1 E_X (node)"


def test_lengths_of_time() -> None:
    assert [seconds_text(0.4), seconds_text(61.9)] == ["0s", "1m1s"]
    assert [days_text(ms) for ms in (89 * DAY_MS, DAY_MS, 1500, -5)] == ["89 days", "1d", "1s", "0s"]


@pytest.mark.parametrize("status", [{}, {"ready": True}, {"ready": True, "count": 1, "subsystems": None}])
def test_a_process_of_another_version_is_named_as_one(status: dict[str, Any]) -> None:
    stream = io.StringIO()
    with pytest.raises(AnotherVersionError, match="restart it"):
        show(
            lambda: status,
            lambda shown: (*lines_of(shown), ("ready", readiness_text({**shown, "ready": False}))),
            as_json=False,
            watch=False,
            stream=stream,
        )
    assert not stream.getvalue()


STATE_DIR = Setting("state_dir", parse_path, "A directory.")
PROGRAM = Program("relay", (STATE_DIR, Setting("name", str, "A name.", default="ant")))


async def asked(directory: Path) -> AskedProcess:
    return await asyncio.to_thread(AskedProcess.ask, PROGRAM, directory)


async def test_a_process_tells_what_it_does_and_its_settings(tmp_path: Path) -> None:
    told = {
        "name": {"text": "bee", "source": "--name"},
        "state_dir": {"text": "/elsewhere", "source": "--state-dir"},
    }
    async with served(tmp_path, lambda: {"settings": told}):
        process = await asked(tmp_path)
    assert process.status == {"settings": told}
    sources = process.sources()
    assert sources is not None
    settings = sources.settings()
    assert settings.given["name"] == Given("bee", "--name")
    assert settings[STATE_DIR] == tmp_path


@pytest.mark.parametrize(
    "status", [{}, {"settings": None}, {"settings": {"name": "bee"}}, {"settings": {"name": {}}}]
)
async def test_settings_of_another_form_are_none(tmp_path: Path, status: dict[str, Any]) -> None:
    async with served(tmp_path, lambda: status):
        process = await asked(tmp_path)
    assert (process.status, process.sources()) == (status, None)


async def test_where_nothing_runs_or_answers_no_check_can_be_made(tmp_path: Path) -> None:
    nothing = await asked(tmp_path)
    with pytest.raises(NotCheckedError, match="the relay does not run"):
        _ = nothing.status

    async def close(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_unix_server(close, tmp_path / NAME):
        stalled = await asked(tmp_path)
    with pytest.raises(NotCheckedError, match="the relay does not answer"):
        _ = stalled.status
    assert (nothing.sources(), stalled.sources()) == (None, None)
