"""Exports the spans that are logged, by OTLP over HTTP: ``--otlp URL``, with the extra ``otel``.

The ids are those of the log and of ``traceparent``; attributes are fixed words and ids, never arguments or
results. OpenTelemetry is loaded only where an exporter is asked for. Must not decide what is a span.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from schemas.error_roots import OperatorError
from schemas.spans import Span, SpanSink, no_spans

_TRACES_PATH = "/v1/traces"
_TIMEOUT_S = 5
_SHUTDOWN_S = 3.0
_SPAN_BYTES = 8


class ExporterMissingError(OperatorError):
    """The extra with the exporter is not installed."""


@contextmanager
def exported(url: str | None, service: str) -> Iterator[SpanSink]:
    """Hold what sends spans of ``service`` to the collector at ``url``; without one, nothing is loaded.

    Sends from a thread. At the end, what waits is sent, for three seconds at most.

    Raises:
        ExporterMissingError: the extra is not installed.
    """
    if url is None:
        yield no_spans
        return
    try:
        # The package takes ten mebibytes and more.
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import ReadableSpan  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
        from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags  # noqa: PLC0415
    except ImportError:
        raise ExporterMissingError("--otlp needs the extra 'otel' (docs/install.md)") from None
    endpoint = url.rstrip("/") + _TRACES_PATH
    processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=_TIMEOUT_S))
    resource = Resource({"service.name": service})

    def context(trace_id: str, span_id: str) -> SpanContext:
        sampled = TraceFlags(TraceFlags.SAMPLED)
        return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=sampled)

    def export(span: Span) -> None:
        end_ns = time.time_ns()
        span_id = span.span_id or os.urandom(_SPAN_BYTES).hex()
        failed = span.error is not None
        processor.on_end(
            ReadableSpan(
                name=span.name,
                context=context(span.trace_id, span_id),
                parent=context(span.trace_id, span.parent_id) if span.parent_id else None,
                resource=resource,
                attributes=dict(span.attributes),
                status=Status(StatusCode.ERROR, span.error) if failed else Status(StatusCode.OK),
                start_time=end_ns - int(span.duration_s * 1e9),
                end_time=end_ns,
            )
        )

    try:
        yield export
    finally:
        # A collector that does not answer takes the whole timeout of each batch.
        closing = threading.Thread(target=processor.shutdown, name="spans", daemon=True)
        closing.start()
        closing.join(_SHUTDOWN_S)
