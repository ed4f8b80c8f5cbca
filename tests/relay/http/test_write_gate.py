import asyncio

import pytest

from relay.http.write_gate import WriteGate

BOUND_S = 10


async def test_it_is_open_at_first() -> None:
    gate = WriteGate()
    assert gate.is_set()
    assert await gate.wait()
    gate.set()
    assert gate.is_set()


async def test_writers_wait_while_it_is_closed_and_all_go_on_once_it_is_open() -> None:
    gate = WriteGate()
    gate.clear()
    gate.clear()
    writers = [asyncio.create_task(gate.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    assert not gate.is_set()
    assert not any(writer.done() for writer in writers)
    gate.set()
    assert await asyncio.wait_for(asyncio.gather(*writers), BOUND_S) == [True] * 3


async def test_a_writer_that_is_cancelled_wakes_no_other() -> None:
    gate = WriteGate()
    gate.clear()
    cancelled, waiting = asyncio.create_task(gate.wait()), asyncio.create_task(gate.wait())
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert not waiting.done()
    gate.set()
    assert await asyncio.wait_for(waiting, BOUND_S)


async def test_a_gate_that_is_closed_again_at_once_holds_those_that_waited() -> None:
    gate = WriteGate()
    gate.clear()
    writer = asyncio.create_task(gate.wait())
    await asyncio.sleep(0)
    gate.set()
    gate.clear()
    for _ in range(3):
        await asyncio.sleep(0)
    assert not writer.done()
    gate.set()
    assert await asyncio.wait_for(writer, BOUND_S)
