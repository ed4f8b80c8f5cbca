"""Sends the samples of one open call as progress notifications. Must not know streams."""

from collections.abc import Callable
from typing import Any

from relay.calls.call_record import Following
from relay.streams.telemetry.history import Sample
from relay.streams.telemetry.sample_queue import SampleQueue
from schemas.projection import META_LOST

"""How many samples were lost before the one of this notification."""


async def send_samples(
    following: Following,
    first: str,
    queue: SampleQueue,
    shown: Callable[[Sample], str],
    lost: Callable[[int], None],
) -> None:
    """Send ``first`` and then each sample of ``queue``, as ``shown`` returns it, as many as are followed.

    ``progress`` counts the samples, also those that the reader has lost: a gap in it shows how many. ``lost``
    is called with their number.

    Raises:
        ToolError: the queue has ended.
        StreamClosedError: the client has disconnected.
    """
    progress, missed, text = 1, 0, first
    while True:
        params: dict[str, Any] = {
            "progressToken": following.progress_token,
            "progress": progress,
            "message": text,
        }
        if missed:
            lost(missed)
            params["_meta"] = {META_LOST: missed}
        before = queue.lost
        await following.emit("notifications/progress", params)
        if following.most is not None and progress >= following.most:
            return
        sample = await queue.get()
        missed = queue.lost - before
        progress += 1 + missed
        text = shown(sample)
