"""The agent's side: what runs on an agent's machine, without the relay's server."""
