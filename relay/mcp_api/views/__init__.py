"""The tools by which agents reach a large fleet: the search for nodes, and one tool for each kind and verb.

``relay.server.app`` registers them beside the relay's other tools::

    relay_tools.register(FindNodes(fleet, kinds, measured, gateway.charge).tool(registry))
"""
