"""The names under ``_meta`` of MCP messages that the relay writes or reads, its own and those of others.

The guarded client reads and writes them too. Must not say what their values may be.
"""

# Of a call.
META_CORRELATION_ID = "edge-kubelet/correlation-id"
META_IDEMPOTENCY_KEY = "edge-kubelet/idempotency-key"
META_TASK_ID = "edge-kubelet/task-id"
META_STEP_ID = "edge-kubelet/step-id"
META_TRACEPARENT = "traceparent"
META_LOG_LEVEL = "io.modelcontextprotocol/logLevel"
META_PROGRESS_TOKEN = "progressToken"  # noqa: S105 - a name of MCP
META_FOLLOW_S = "edge-kubelet/follow-s"
"""For how many seconds a call that streams stays open, where its caller follows it."""

# Of a listed tool.
META_SAFETY_CLASS = "edge-kubelet/safety-class"
META_CAPABILITY_ETAG = "edge-kubelet/capability-etag"
META_CANONICAL_NAME = "edge-kubelet/canonical-name"
META_SCHEMA_REF = "edge-kubelet/schema-ref"

# Of an answer, and of progress.
META_ERROR = "edge-kubelet/error"
META_HOP = "edge-kubelet/hop"
META_LOST = "edge-kubelet/lost"
