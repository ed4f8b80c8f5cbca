"""The guarded client, as the official suite runs a client: it lists the tools of a server, and calls them.

Where the suite gives a client's id and secret, it presents these, by OAuth's client credentials.
"""

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urljoin

import httpx2

from relay.remote_tools import (
    ClientCredentials,
    HttpServer,
    Permissions,
    RemoteTools,
    Risk,
    ToolInvalidArguments,
)

_VALUES: Mapping[str, object] = {"number": 2, "integer": 2, "string": "two", "boolean": True}


def credentials_for(url: str, given: Mapping[str, str]) -> ClientCredentials | None:
    """Return what the suite gives to present; an operator would have looked up its issuer as it is here."""
    if "client_secret" not in given:
        return None
    found = httpx2.get(urljoin(url, "/.well-known/oauth-protected-resource/mcp"), trust_env=False).json()
    return ClientCredentials(
        given["client_id"], lambda: given["client_secret"], found["authorization_servers"][0]
    )


def arguments_for(schema: Mapping[str, Any], echoed: Mapping[str, Any]) -> dict[str, object]:
    """Return arguments that fit a plain ``schema``; where an object is wanted it is ``echoed``."""
    return {
        name: _VALUES.get(schema["properties"][name].get("type"), echoed)
        for name in schema.get("required", ())
    }


async def main(url: str) -> None:
    given = json.loads(os.environ.get("MCP_CONFORMANCE_CONTEXT") or "{}")
    server = HttpServer(url, credentials_for(url, given))
    permissions = Permissions(("*",), Risk.ADMIN)
    async with RemoteTools(server, audit=lambda _: None, permissions=permissions) as tools:
        listed = await tools.list_tools()
        calls = [(call["name"], call["arguments"]) for call in given.get("toolCalls", ())]
        for name, arguments in calls or [
            (tool.name, arguments_for(tool.input_schema, listed[0].input_schema)) for tool in listed
        ]:
            with suppress(ToolInvalidArguments):  # it has not been sent
                print((await tools.execute(name, arguments)).text)


asyncio.run(main(sys.argv[1]))
