"""The relay's groups of commands, one module each."""
