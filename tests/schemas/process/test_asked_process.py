import asyncio
from pathlib import Path
from typing import Any

import pytest

from schemas.process.asked_process import AskedProcess
from schemas.process.doctor import NotCheckedError
from schemas.process.status_socket import NAME, served
from schemas.settings import Given, Setting, parse_path
from schemas.settings_sources import Program

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
