"""Every line of both programs' logs has one shape, wherever it comes from."""

import asyncio
import gc
import logging
import re
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import paho.mqtt.client as paho
import pytest
import uvicorn
import websockets
from paho.mqtt.enums import CallbackAPIVersion

from schemas.faults import FailedError
from schemas.process.logs import fatal_errors_logged, open_log
from tests.fakes.lines import BOUND_S, LogLines
from tests.fakes.ports import unused_port

HEAD = ["ts", "level", "component", "event"]
LEVELS = {"info", "warning", "error", "critical"}
MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")

PROGRAMS = ("kubelet", "relay")


def check_shape(line: dict[str, Any], component: str) -> None:
    """Check the head of a line, and that its other members are no structures."""
    assert list(line)[:4] == HEAD
    assert MOMENT.fullmatch(line["ts"])
    assert line["level"] in LEVELS
    assert line["component"] == component
    assert all(value is None or isinstance(value, str | int | float) for value in line.values())


def planted(*_: object) -> None:
    raise LookupError("planted")


async def of_the_program(log: Any) -> None:
    log.info("command done", correlation_id="01HZX9K3M4P7Q8R9S0T1V2W3XY")


async def of_uvicorn(_log: Any) -> None:
    async def application(*_: object) -> None:
        await asyncio.sleep(0)
        planted()

    port = unused_port()
    server = uvicorn.Server(
        uvicorn.Config(application, port=port, lifespan="off", log_config=None, log_level="warning")
    )
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    await reader.read()
    writer.close()
    server.should_exit = True
    await serving


async def of_websockets(_log: Any) -> None:
    async def handle(_connection: object) -> None:
        await asyncio.sleep(0)
        planted()

    async with websockets.serve(handle, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with suppress(websockets.ConnectionClosed):
            async with websockets.connect(f"ws://127.0.0.1:{port}", proxy=None) as client:
                await client.recv()


async def of_paho(_log: Any) -> None:
    failed = threading.Event()

    def fail(*_: object) -> None:
        failed.set()
        planted()

    client = paho.Client(CallbackAPIVersion.VERSION2)
    client.enable_logger(logging.getLogger("paho"))  # as both programs do
    client.on_connect_fail = fail
    client.connect_async("127.0.0.1", unused_port())
    client.loop_start()
    await asyncio.to_thread(failed.wait, BOUND_S)
    await asyncio.to_thread(client.loop_stop)


async def of_asyncio(_log: Any) -> None:
    asyncio.get_running_loop().call_soon(planted)
    await asyncio.sleep(0)


async def of_a_forgotten_task(_log: Any) -> None:
    async def work() -> None:
        planted()

    task = asyncio.create_task(work())
    await asyncio.wait([task])
    del task
    gc.collect()


async def of_a_warning(_log: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(capture=False)  # the block above has its own way of showing them
        logging.captureWarnings(capture=True)
        warnings.warn("planted", stacklevel=1)


async def of_a_thread(_log: Any) -> None:
    thread = threading.Thread(target=planted)
    thread.start()
    thread.join()


async def of_an_object_that_is_removed(_log: Any) -> None:
    class Broken:
        def __del__(self) -> None:
            planted()

    Broken()
    gc.collect()


SOURCES: list[Callable[[Any], Any]] = [
    of_the_program,
    of_uvicorn,
    of_websockets,
    of_paho,
    of_asyncio,
    of_a_forgotten_task,
    of_a_warning,
    of_a_thread,
    of_an_object_that_is_removed,
]


@pytest.mark.integration
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__)
@pytest.mark.parametrize("component", PROGRAMS)
async def test_a_line_of_each_source_has_the_one_shape(component: str, source: Callable[[Any], Any]) -> None:
    lines = LogLines()
    with open_log(component, lines) as (log, _):
        async with asyncio.timeout(BOUND_S):
            await source(log)
    assert lines.entries()
    for line in lines.entries():
        check_shape(line, component)


@pytest.mark.parametrize("component", PROGRAMS)
async def test_the_exception_that_ends_a_program_has_the_one_shape(component: str) -> None:
    lines = LogLines()
    with open_log(component, lines) as (log, _), pytest.raises(FailedError), fatal_errors_logged(log):
        planted()
    [line] = lines.entries()
    check_shape(line, component)
    assert (line["level"], line["event"]) == ("critical", "program fails")
