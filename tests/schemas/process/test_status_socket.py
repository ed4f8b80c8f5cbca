import asyncio
import os
import socket
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from schemas.process.status_socket import NAME, NotRunningError, StalledError, read_status, served

BOUND_S = 30
STATUS: dict[str, Any] = {"ready": True, "relay": {"state": "announced"}}


async def test_the_operator_reads_what_the_process_does_now(tmp_path: Path) -> None:
    shown = dict(STATUS)
    async with served(tmp_path, lambda: shown):
        assert await asyncio.to_thread(read_status, tmp_path) == STATUS
        shown["ready"] = False
        assert (await asyncio.to_thread(read_status, tmp_path))["ready"] is False


async def test_a_relay_may_name_each_node_of_a_large_fleet(tmp_path: Path) -> None:
    nodes = {f"01hzx9k3m4p7q8r9s0t1{number:06}": "behind" for number in range(100_000)}
    status = {**STATUS, "nodes": {"wrong_clocks": nodes, "silent": nodes}}
    async with served(tmp_path, lambda: status):
        assert await asyncio.to_thread(read_status, tmp_path) == status


async def test_its_own_user_alone_can_connect_and_the_file_goes_with_the_process(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        async with served(tmp_path, lambda: STATUS):
            mode = (tmp_path / NAME).stat().st_mode
    finally:
        os.umask(before)
    assert (stat.S_ISSOCK(mode), stat.S_IMODE(mode)) == (True, 0o600)
    assert os.listdir(tmp_path) == []  # noqa: PTH208 - the event loop is this test's own


async def test_a_file_that_a_process_left_behind_when_it_was_killed_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / NAME))
    with pytest.raises(NotRunningError, match="nothing runs"):
        read_status(tmp_path)
    async with served(tmp_path, lambda: STATUS):
        assert await asyncio.to_thread(read_status, tmp_path) == STATUS


async def test_a_state_directory_may_have_a_path_that_is_too_long_for_a_socket(tmp_path: Path) -> None:
    directory = tmp_path / ("long" * 30)
    directory.mkdir()
    async with served(directory, lambda: STATUS):
        assert await asyncio.to_thread(read_status, directory) == STATUS


@pytest.mark.parametrize("name", ["", "no-such-directory"])
def test_where_nothing_runs_the_operator_is_told_what_to_do(tmp_path: Path, name: str) -> None:
    with pytest.raises(NotRunningError, match="--state-dir"):
        read_status(tmp_path / name)


@pytest.mark.parametrize(
    "status", [b"[" * 100_000, b"[]", b"{", b"\xff"], ids=["deep", "array", "cut", "binary"]
)
def test_what_is_no_status_is_not_shown(tmp_path: Path, status: bytes) -> None:
    with silent(tmp_path) as listener, ThreadPoolExecutor(1) as thread:
        read = thread.submit(read_status, tmp_path)
        with listener.accept()[0] as connection:
            connection.sendall(status)
        with pytest.raises(StalledError):
            read.result(BOUND_S)


@contextmanager
def silent(directory: Path) -> Iterator[socket.socket]:
    """Take connections and say nothing, as a process whose event loop has stalled."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / NAME))
        listener.listen()
        yield listener


def test_a_process_that_does_not_answer_is_told_apart_from_one_that_does_not_run(tmp_path: Path) -> None:
    with silent(tmp_path), pytest.raises(StalledError, match="stalls"):
        read_status(tmp_path, timeout_s=0.05)


async def test_a_client_that_goes_at_once_harms_nothing(tmp_path: Path) -> None:
    async with served(tmp_path, lambda: STATUS):
        for _ in range(20):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(tmp_path / NAME))
        assert await asyncio.to_thread(read_status, tmp_path) == STATUS
