"""MCP on standard input and output, bridged to a relay that runs elsewhere.

token = RenewableToken.find(token_file, os.environ)
run_stdio("https://relay.example/mcp", token, client_context(), None, sys.stderr)
"""
