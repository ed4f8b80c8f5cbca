"""What in a history breaks the promises to those that follow telemetry. Pure functions of records."""

from collections.abc import Iterator
from itertools import pairwise

from tests.chaos.evidence import Check, Evidence, Violation
from tests.chaos.history import History


def _wrong_sample(history: History, _: Evidence) -> Iterator[Violation]:
    for following in history.followings:
        for sample in following.samples:
            if sample.node_id != following.node_id:
                yield Violation("wrong sample", following.node_id, f"one of {sample.node_id}")


def _sample_twice(history: History, _: Evidence) -> Iterator[Violation]:
    """A node's samples have times that grow, and so one that is equal or older was sent before."""
    for following in history.followings:
        for one, another in pairwise(following.samples):
            if another.ts_ms <= one.ts_ms:
                seen = f"{another.ts_ms} after {one.ts_ms}, as number {another.progress}"
                yield Violation("sample twice", following.node_id, seen)


def _loss_not_counted(history: History, _: Evidence) -> Iterator[Violation]:
    for following in history.followings:
        before = 0
        for sample in following.samples:
            if sample.progress != before + 1 + sample.lost:
                seen = f"number {sample.progress} after {before}, and {sample.lost} counted"
                yield Violation("loss not counted", following.node_id, seen)
            before = sample.progress


def _stream_without_end(history: History, evidence: Evidence) -> Iterator[Violation]:
    for following in history.followings:
        if following.is_silent:
            yield Violation("stream without end", following.node_id, "neither a sample nor an end")
        if len(following.ends) > 1:
            yield Violation("two outcomes", following.node_id, f"{len(following.ends)} ends of a stream")
        ended_ms = following.ended_ms
        if ended_ms is None or following.ends or following.is_silent:
            continue
        # A connection breaks when it is used, which may be a sample later.
        newest_ms = following.samples[-1].at_ms if following.samples else following.began_ms
        if not evidence.is_disturbed(newest_ms, ended_ms, following.link, following.relay):
            yield Violation("stream without end", following.node_id, "its connection broke without a cause")


STREAM_CHECKS: tuple[Check, ...] = (_wrong_sample, _sample_twice, _loss_not_counted, _stream_without_end)
