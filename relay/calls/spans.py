"""The span of a call, as its line in the access log has it. Must not hold arguments or results."""

from relay.calls.call_record import CallRecord
from schemas.process.spans import Span


def span_of(record: CallRecord, outcome: str, duration_s: float) -> Span | None:
    """Return the span of a call that has ended; None of one that is not traced, or was not sent to a node.

    ``outcome`` is ``ok``, ``cancelled`` or the code of its failure.
    """
    trace, tool = record.call.trace, record.tool
    if trace is None or tool is None or record.span_id is None:
        return None
    attributes = {
        "edge.tool": tool.canonical,
        "edge.node_id": tool.node_id or "",
        "edge.correlation_id": record.correlation_id,
        "edge.outcome": outcome,
    }
    if record.call.given_id:
        attributes["edge.caller_correlation_id"] = record.call.given_id
    failed = None if outcome == "ok" else outcome
    if failed is not None:
        attributes["edge.hop"] = record.hop.value
    return Span(
        "edge.call",
        trace.trace_id,
        duration_s,
        attributes,
        span_id=record.span_id,
        parent_id=trace.parent_id,
        error=failed,
    )
