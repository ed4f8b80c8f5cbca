"""Sign-in: people with passkeys, and an authorization server for their MCP clients (OAuth 2.1, RFC 8414).

An option of the relay, made when a person has been invited. Its access tokens are the agents' tokens of
``relay.auth``. Must not decide about a call, and must not be imported by the core.
"""
