import subprocess
import sys

import pytest

from schemas.process import spans
from schemas.process.spans import ExporterMissingError, exported
from schemas.spans import Span
from tests.fakes.collector import collecting

BATCH = 512
"""What OpenTelemetry sends at once."""
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SPAN = Span(
    "call", TRACE_ID, 0.25, {"tool": "echo"}, span_id="b7ad6b7169203331", parent_id="00f067aa0ba902b7"
)


@pytest.mark.integration
def test_a_span_arrives_at_the_collector_with_the_ids_of_the_log() -> None:
    with collecting() as collector:
        with exported(collector.url, "edge-relay") as export:
            export(SPAN)
        service, span = collector.next()
    assert (service, span.name) == ("edge-relay", "call")
    assert span.trace_id.hex() == TRACE_ID
    assert (span.span_id.hex(), span.parent_span_id.hex()) == (SPAN.span_id, SPAN.parent_id)
    assert span.end_time_unix_nano - span.start_time_unix_nano == 250_000_000
    assert {attribute.key: attribute.value.string_value for attribute in span.attributes} == {"tool": "echo"}


@pytest.mark.integration
def test_a_failure_is_the_status_and_a_span_without_id_gets_one() -> None:
    with collecting() as collector:
        with exported(collector.url, "edge-kubelet") as export:
            export(Span("command", TRACE_ID, 0.0, {}, error="E_INTERNAL"))
        _, span = collector.next()
    assert (span.status.code, span.status.message) == (2, "E_INTERNAL")
    assert (len(span.span_id), span.parent_span_id) == (8, b"")


@pytest.mark.integration
def test_a_collector_that_is_not_there_harms_nothing() -> None:
    with exported("http://127.0.0.1:9", "edge-relay") as export:
        export(SPAN)


@pytest.mark.integration
def test_a_collector_that_does_not_answer_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "_SHUTDOWN_S", 0.1)
    batches = 3
    with collecting() as collector:
        collector.answers.clear()
        try:
            with exported(collector.url, "edge-relay") as export:
                for _ in range(batches * BATCH):
                    export(SPAN)
            assert len(collector.raw) < batches
        finally:
            collector.answers.set()
        for _ in range(batches * BATCH):
            collector.next()


@pytest.mark.integration
def test_without_a_collector_nothing_is_loaded() -> None:
    code = (
        "import sys; from schemas.process.spans import exported\n"
        "with exported(None, 'x') as export: pass\n"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False, timeout=60).returncode == 0


def test_without_the_extra_the_operator_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ExporterMissingError, match=r"the extra 'otel'"), exported("http://x", "y"):
        raise AssertionError
