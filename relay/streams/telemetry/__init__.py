"""What agents follow: the samples of nodes, shared by all that want them."""
