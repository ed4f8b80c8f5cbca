"""Which nodes there are, what they announced, and the tools that follow from it."""
