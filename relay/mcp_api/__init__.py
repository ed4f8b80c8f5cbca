"""MCP in both protocol eras, over the call gateway; the only package of the server with the MCP SDK.

``McpEndpoint`` is an ASGI application. A whole request can also be answered without ASGI::

    pending = endpoint.begin(caller, body)  # None: ASGI serves it
    answer = await pending
"""
