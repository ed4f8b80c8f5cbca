"""Caller tools: sessions of agents with nodes, and the tools that an agent lends to a node's local agent."""
