import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import pytest

from relay.client.stdio_bridge.bridge import Input, Output

BOUND_S = 10


@pytest.fixture
def pipe() -> Iterator[tuple[FileIO, FileIO]]:
    reading, writing = os.pipe()
    with FileIO(reading, "rb") as reader, FileIO(writing, "wb") as writer:
        yield reader, writer


def receive(reader: FileIO, size: int) -> bytes:
    received = b""
    while len(received) < size and (chunk := reader.read(size - len(received))):
        received += chunk
    return received


async def collected(descriptor: int) -> bytes:
    async with asyncio.timeout(BOUND_S):
        return b"".join([chunk async for chunk in Input(descriptor).chunks()])


async def test_all_that_comes_through_a_pipe_is_read_in_order(pipe: tuple[FileIO, FileIO]) -> None:
    reader, writer = pipe
    sent = bytes(range(256)) * 4096  # far more than a pipe holds

    def send() -> None:
        rest = sent
        while rest:
            rest = rest[writer.write(rest) :]
        writer.close()

    received, _ = await asyncio.gather(collected(reader.fileno()), asyncio.to_thread(send))
    assert received == sent


async def test_a_file_is_read_to_its_end(tmp_path: Path) -> None:
    # What asyncio has for pipes refuses a file.
    file = tmp_path / "lines"
    file.write_bytes(b"one\ntwo")
    with file.open("rb") as opened:
        assert await collected(opened.fileno()) == b"one\ntwo"


async def test_an_input_that_cannot_be_read_is_at_its_end(pipe: tuple[FileIO, FileIO]) -> None:
    _, writer = pipe
    assert await collected(writer.fileno()) == b""


async def test_lines_come_out_whole_and_in_order_though_the_pipe_is_full(pipe: tuple[FileIO, FileIO]) -> None:
    reader, writer = pipe
    output = Output(writer.fileno())
    lines = [bytes([65 + number]) * 100_000 for number in range(5)]
    writes = [asyncio.create_task(output.write(line)) for line in lines]
    size = sum(len(line) + 1 for line in lines)
    received = await asyncio.wait_for(asyncio.to_thread(receive, reader, size), BOUND_S)
    assert received.splitlines() == lines
    await asyncio.wait_for(asyncio.gather(*writes), BOUND_S)


async def test_a_writer_that_is_cancelled_leaves_no_half_of_a_line(pipe: tuple[FileIO, FileIO]) -> None:
    reader, writer = pipe
    output = Output(writer.fileno())
    first = asyncio.create_task(output.write(b"A" * 200_000))
    await asyncio.to_thread(reader.read, 1)  # it is being written
    first.cancel()
    last = asyncio.create_task(output.write(b"B"))
    expected = b"A" * 199_999 + b"\nB\n"
    received = await asyncio.wait_for(asyncio.to_thread(receive, reader, len(expected)), BOUND_S)
    assert received == expected
    await asyncio.wait_for(last, BOUND_S)


async def test_a_closed_reader_is_an_error_of_the_writer(pipe: tuple[FileIO, FileIO]) -> None:
    reader, writer = pipe
    reader.close()
    with pytest.raises(BrokenPipeError):
        await asyncio.wait_for(Output(writer.fileno()).write(b"hello?"), BOUND_S)


@pytest.mark.integration
def test_a_stray_print_goes_elsewhere_once_the_output_is_claimed() -> None:
    program = (
        "import os, sys\n"
        "from relay.client.stdio_bridge.bridge import claim_output\n"
        "own = claim_output()\n"
        "print('a stray print', flush=True)\n"
        "os.write(own, b'{}\\n')\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, check=True, timeout=60)
    assert done.stdout == b"{}\n"
    assert done.stderr == b"a stray print\n"
