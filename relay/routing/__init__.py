"""The seam between calls and sessions: routes a command to the process that holds the node's session."""
