"""Composition of the relay, and the watcher of the operator's decisions."""
