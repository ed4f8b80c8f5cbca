"""A span, as a call or a command of a trace leaves it when it ends, and what takes it.

Attributes are fixed words and ids, never arguments or results. Must not export anything.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """One span that has just ended.

    Attributes:
        trace_id, span_id, parent_id: in hex; without a ``span_id`` it gets one, without a ``parent_id`` the
            span that it belongs to is not known.
        duration_s: how long it took.
        error: the code of its failure; None if it succeeded.
    """

    name: str
    trace_id: str
    duration_s: float
    attributes: Mapping[str, str]
    span_id: str | None = None
    parent_id: str | None = None
    error: str | None = None


SpanSink = Callable[[Span], None]
"""Takes a span that has ended. It must not block."""


def no_spans(_span: Span) -> None:
    """Export nothing."""
