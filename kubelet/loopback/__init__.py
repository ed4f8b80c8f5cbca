"""What the operator of a node can ask it over HTTP on its loopback address."""
