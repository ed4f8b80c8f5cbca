# It runs in the environment of python-sdk-1.lock, whose major version of the SDK has other types than ours.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
"""The official Python client of major version 1: signs in at the URL it is given, and calls one tool there.

It prints where its user has to go, and reads where the browser was sent after that.
"""

import asyncio
import sys
from urllib.parse import parse_qs, urlsplit

from mcp import ClientSession
from mcp.client.auth import OAuthClientProvider
from mcp.client.streamable_http import streamablehttp_client
from mcp.shared.auth import OAuthClientMetadata


class Memory:
    """What the client keeps: for as long as it runs."""

    tokens = client = None

    async def get_tokens(self):
        return self.tokens

    async def set_tokens(self, tokens):
        self.tokens = tokens

    async def get_client_info(self):
        return self.client

    async def set_client_info(self, client_info):
        self.client = client_info


async def show(url):
    print(url, flush=True)


async def read():
    answer = parse_qs(urlsplit((await asyncio.to_thread(input)).strip()).query)
    return answer["code"][0], answer["state"][0]


async def main(url, tool):
    metadata = OAuthClientMetadata(
        client_name="Python SDK 1", redirect_uris=["http://127.0.0.1:47112/callback"]
    )
    auth = OAuthClientProvider(url, metadata, Memory(), show, read)
    async with (
        streamablehttp_client(url, auth=auth) as (receive, send, _),
        ClientSession(receive, send) as session,
    ):
        await session.initialize()
        print((await session.call_tool(tool, {})).model_dump_json())


asyncio.run(main(*sys.argv[1:]))
