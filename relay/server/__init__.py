"""Composition: the relay put together, and what follows the operator's decisions while it runs."""
