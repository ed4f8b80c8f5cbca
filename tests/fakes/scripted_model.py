"""A model that calls one tool, once, for clients that others wrote: it speaks to Claude Code and to Codex."""

import json
import subprocess
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.fakes.npm import NpmPrograms

_Event = dict[str, Any]
_SAID = "Done."


@dataclass(slots=True)
class ScriptedModel:
    """The script, and what came of it.

    Attributes:
        tool: how the name of the tool ends: each client has a prefix of its own, and Codex lists a dash as an
            underscore.
        answers: what the tool answered, as the client passed it on.
    """

    tool: str
    arguments: Mapping[str, Any]
    url: str = ""
    answers: list[str] = field(default_factory=list)

    @property
    def answer(self) -> Any:
        """The JSON of the only answer; Codex puts a line on the time before it."""
        [answer] = self.answers
        return json.loads(answer[answer.index("{") :])

    def respond(self, path: str, request: _Event) -> list[_Event]:
        """Return the events of the answer to one request."""
        if "/messages" in path:
            return self._message(request)
        return self._response(request)

    def _message(self, request: _Event) -> list[_Event]:
        blocks = [
            block for m in request["messages"] if isinstance(m["content"], list) for block in m["content"]
        ]
        self._keep(block["content"] for block in blocks if block["type"] == "tool_result")
        name = self._to_call(tool["name"] for tool in request.get("tools", ()))
        if name:
            block = {"type": "tool_use", "id": "toolu_1", "name": name, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(self.arguments)}
        else:
            block = {"type": "text", "text": ""}
            delta = {"type": "text_delta", "text": _SAID}
        usage = {"input_tokens": 1, "output_tokens": 1}
        message = {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "model": request["model"],
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        end = {"stop_reason": "tool_use" if name else "end_turn", "stop_sequence": None}
        return [
            {"type": "message_start", "message": message},
            {"type": "content_block_start", "index": 0, "content_block": block},
            {"type": "content_block_delta", "index": 0, "delta": delta},
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": end, "usage": usage},
            {"type": "message_stop"},
        ]

    def _response(self, request: _Event) -> list[_Event]:
        self._keep(item["output"] for item in request["input"] if item["type"] == "function_call_output")
        # Codex lists the tools of a server in a namespace of that server.
        offered = {
            inner["name"]: tool.get("name") if tool["type"] == "namespace" else None
            for tool in request.get("tools", ())
            for inner in tool.get("tools", [tool])
            if "name" in inner
        }
        name = self._to_call(offered)
        item: _Event
        if name:
            item = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": name}
            item["arguments"] = json.dumps(self.arguments)
            if offered[name]:
                item["namespace"] = offered[name]
        else:
            said = {"type": "output_text", "text": _SAID, "annotations": []}
            item = {"type": "message", "id": "msg_1", "role": "assistant", "content": [said]}
        usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
        return [
            {"type": "response.created", "response": {"id": "resp_1"}},
            {"type": "response.output_item.done", "output_index": 0, "item": item},
            {"type": "response.completed", "response": {"id": "resp_1", "usage": usage}},
        ]

    def _keep(self, results: Iterable[Any]) -> None:
        """Keep the results of tools, which are texts in both clients."""
        self.answers += results

    def _to_call(self, offered: Iterable[str]) -> str | None:
        """Return the full name of the tool, if it is offered and has not been called."""
        end = self.tool.replace("-", "_")
        named = (name for name in offered if name.replace("-", "_").endswith(end))
        return None if self.answers else next(named, None)


@contextmanager
def scripted_model(tool: str, arguments: Mapping[str, Any]) -> Iterator[ScriptedModel]:
    """Serve a model during the block that calls the tool whose name ends with ``tool``, once."""
    model = ScriptedModel(tool, arguments)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            events = model.respond(self.path, json.loads(body))
            stream = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Content-Length", str(len(stream)))
            self.end_headers()
            self.wfile.write(stream.encode())

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    model.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield model
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


def ask_claude_code(npm: NpmPrograms, model: ScriptedModel) -> subprocess.CompletedProcess[str]:
    """Run Claude Code, which has the server "edge", until ``model`` has said that it is done."""
    return npm.execute(
        (npm.claude_code(), "--print", "Go on.", "--allowedTools", "mcp__edge"),
        environment={
            "ANTHROPIC_BASE_URL": model.url,
            "ANTHROPIC_API_KEY": "none",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "ENABLE_TOOL_SEARCH": "false",
            # It asks its model without a server that takes more than some seconds to be connected.
            "MCP_CONNECTION_NONBLOCKING": "false",
            "MCP_CONNECT_TIMEOUT_MS": "60000",
        },
    )


def ask_codex(npm: NpmPrograms, model: ScriptedModel) -> subprocess.CompletedProcess[str]:
    """Run Codex, which has the server "edge", until ``model`` has said that it is done."""
    settings = {
        # Of a model that it does not know, it does not take it that it searches for tools.
        "model": "scripted",
        "model_provider": "scripted",
        "model_providers.scripted": f'{{name="scripted", base_url="{model.url}", wire_api="responses"}}',
        # Codex asks its model before a server is connected that it does not have to wait for.
        "mcp_servers.edge.required": "true",
    }
    options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    return npm.run(
        *("codex", "exec", "--skip-git-repo-check", *options),
        *("--dangerously-bypass-approvals-and-sandbox", "Go on."),
    )
