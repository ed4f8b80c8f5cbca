"""What a node can do: one file per kind."""
