import asyncio

from relay.mcp_api.change_streams import PendingUpdates


async def test_an_update_that_waits_is_not_added_again() -> None:
    updates = PendingUpdates[str]()
    for name in ("a", "b", "a", "a"):
        updates.add(name)
    assert [await updates.next(), await updates.next()] == ["a", "b"]
    updates.add("a")
    updates.close()
    assert [await updates.next(), await updates.next()] == ["a", None]


async def test_a_reader_waits_for_the_next_update_and_for_the_end() -> None:
    updates = PendingUpdates[str]()
    reader = asyncio.create_task(updates.next())
    await asyncio.sleep(0)
    updates.add("a")
    assert await asyncio.wait_for(reader, 10) == "a"
    reader = asyncio.create_task(updates.next())
    await asyncio.sleep(0)
    updates.close()
    assert await asyncio.wait_for(reader, 10) is None
