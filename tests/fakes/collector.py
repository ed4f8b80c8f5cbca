"""A collector of OpenTelemetry on this machine, which keeps the spans that are sent to it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

BOUND_S = 30


class Collector:
    """What was sent, decoded: the name of each service with its spans. Answers while ``answers`` is set."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.raw: list[bytes] = []
        self.answers = threading.Event()
        self.answers.set()
        self._spans: Queue[tuple[str, Any]] = Queue()

    def take(self, body: bytes) -> None:
        self.raw.append(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            (service,) = [
                a.value.string_value for a in resource.resource.attributes if a.key == "service.name"
            ]
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self._spans.put((service, span))

    def next(self) -> tuple[str, Any]:
        """Return the next span, with its service."""
        return self._spans.get(timeout=BOUND_S)


@contextmanager
def collecting() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert (self.path, self.headers["Content-Type"]) == ("/v1/traces", "application/x-protobuf")
            collector.take(body)
            collector.answers.wait(BOUND_S)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(server.server_address[1])
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()
