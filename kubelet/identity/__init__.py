"""The node's key and certificate: made, enrolled, verified, installed."""
