"""The reference: the MCP SDK's own echo handler, served as the relay is, with no hop behind it.

In the SDK's default mode, which answers by event streams and has sessions in the older era; or with
``fastest`` in its fastest one, which answers by JSON and has none.
"""

import sys
from typing import Any

import uvicorn
from mcp.server.lowlevel import Server
from mcp_types import CallToolRequestParams, CallToolResult, ListToolsResult, TextContent, Tool

TOOL = "echo"
_SCHEMA: dict[str, Any] = {"type": "object", "properties": {"message": {"type": "string"}}}


async def list_tools(_context: object, _params: object) -> ListToolsResult:
    """Return the one tool."""
    return ListToolsResult(tools=[Tool(name=TOOL, input_schema=_SCHEMA)])


async def call_tool(_context: object, params: CallToolRequestParams) -> CallToolResult:
    """Return the message."""
    message = (params.arguments or {})["message"]
    return CallToolResult(
        content=[TextContent(type="text", text=message)],
        structured_content={"message": message},
        is_error=False,
    )


FASTEST = "fastest"


def main(port: int, *, is_fastest: bool) -> None:
    """Serve on ``port`` of the loopback address."""
    server = Server(
        "bare",
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        get_tool_input_schema=lambda _name: _SCHEMA,
    )
    uvicorn.run(
        server.streamable_http_app(json_response=is_fastest, stateless_http=is_fastest),
        port=port,
        loop="uvloop",
        http="httptools",
        log_level="critical",
        access_log=False,
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), is_fastest=FASTEST in sys.argv[2:])
