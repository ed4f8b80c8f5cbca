"""What agents see of a large fleet: one tool for each kind and verb, and the search for nodes."""
