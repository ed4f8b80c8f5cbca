"""What flows between a node and an agent besides calls: telemetry, and the tools that callers lend."""
