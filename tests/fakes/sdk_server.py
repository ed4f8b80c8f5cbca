"""A server on MCP's SDK for Python, over stdio: the tools of ``tests/conformance/sdk_server.mjs``."""

from typing import Annotated

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import AfterValidator

server = MCPServer("sdk")


def _even(n: int) -> int:
    if n % 2:
        raise ValueError("it is odd")
    return n


@server.tool()
def even(n: Annotated[int, AfterValidator(_even)]) -> str:  # noqa: ARG001 - it is checked before
    """Do nothing, with an even number."""
    return "done"


@server.tool()
def fails() -> str:
    """Fail with a text that another failure has."""
    raise ToolError("Unknown tool: another")


@server.tool()
def once() -> str:
    """Do nothing, and be gone after that."""
    server.remove_tool("once")
    return "done"


if __name__ == "__main__":
    server.run()
