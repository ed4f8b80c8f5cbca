import asyncio

from kubelet.local_agent.agent_tools import MAX_UNREAD, Mailbox


async def test_messages_are_read_once_and_in_order() -> None:
    mailbox = Mailbox()
    mailbox.put("one")
    mailbox.put("two")
    assert await mailbox.take(0) == ["one", "two"]
    assert await mailbox.take(0) == []


async def test_a_reader_may_wait_for_the_first_one() -> None:
    mailbox = Mailbox()
    reading = asyncio.create_task(mailbox.take(10_000))
    await asyncio.sleep(0)
    mailbox.put("late")
    assert await reading == ["late"]
    assert await mailbox.take(1) == []


async def test_of_too_many_the_newest_are_kept() -> None:
    mailbox = Mailbox()
    for number in range(MAX_UNREAD + 1):
        mailbox.put(str(number))
    messages = await mailbox.take(0)
    assert (len(messages), messages[0]) == (MAX_UNREAD, "1")
