"""The tools that callers lend to this node's local agent, and the Unix socket on which it uses them."""
