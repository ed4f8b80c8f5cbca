"""The answer of a node of this relay to a command: what follows it is called in the turn in which it arrives.

A future tells what waits for it in the next turn of the event loop, and a turn costs as much as it takes to
read a frame. A relay that runs a command for another one need not wait for it: it passes the answer on.
Must not know how a command is sent.
"""

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from schemas.errors import Failure, ToolError
from schemas.payloads import CmdAck

OnAnswer = Callable[["CommandAnswer"], object]


class CommandAnswer:
    """Can be awaited; cancelling it, or what awaits it, cancels the command on the node.

    Holds a future, and is none: one is made for every call, and a task takes longer to await another class.
    """

    __slots__ = ("_followers", "_future")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._future: asyncio.Future[CmdAck] = loop.create_future()
        self._followers: list[OnAnswer] = []

    def __await__(self) -> Generator[Any, None, CmdAck]:
        try:
            return (yield from self._future)
        except asyncio.CancelledError:
            self.cancel()
            raise

    def at_end(self, follow: OnAnswer) -> None:
        """Call ``follow`` when this has ended or is cancelled, before what awaits it; at once if it has."""
        self._followers.append(follow)
        if self._future.done():
            self._end()

    def done(self) -> bool:
        """Return whether it has ended or was cancelled."""
        return self._future.done()

    def cancelled(self) -> bool:
        """Return whether it was cancelled."""
        return self._future.cancelled()

    def result(self) -> CmdAck:
        """Return the node's answer, or raise why there is none."""
        return self._future.result()

    def exception(self) -> BaseException | None:
        """Return why there is no answer; None if there is one."""
        return self._future.exception()

    def set_result(self, ack: CmdAck) -> None:
        """Give the node's answer."""
        self._future.set_result(ack)
        self._end()

    def set_exception(self, error: BaseException) -> None:
        """Give the reason why there is none."""
        self._future.set_exception(error)
        self._future.exception()  # retrieved: else asyncio reports it if the caller has gone
        self._end()

    def expire(self) -> None:
        """Fail with DEADLINE_EXCEEDED, unless this is done."""
        if not self._future.done():
            self.set_exception(ToolError(Failure.DEADLINE_EXCEEDED))

    def cancel(self) -> None:
        """Cancel the command, unless this is done."""
        self._future.cancel()
        self._end()

    def _end(self) -> None:
        followers, self._followers = self._followers, []
        for follow in followers:
            try:
                follow(self)
            except Exception as error:  # noqa: BLE001 - a bug of one must not keep it from the others
                text = "an answer could not be followed"
                self._future.get_loop().call_exception_handler({"message": text, "exception": error})


def answer_of(work: Coroutine[Any, Any, CmdAck]) -> CommandAnswer:
    """Return the answer that ``work`` returns, which runs in a task and is cancelled with the answer."""
    loop = asyncio.get_running_loop()
    answer, task = CommandAnswer(loop), loop.create_task(work)
    answer.at_end(lambda _: task.cancel())

    def take(_: "asyncio.Task[CmdAck]") -> None:
        if answer.done():
            return
        if task.cancelled():
            answer.cancel()
        elif (error := task.exception()) is not None:
            answer.set_exception(error)
        else:
            answer.set_result(task.result())

    task.add_done_callback(take)
    return answer
