"""The tools by which agents reach a large fleet: the search for nodes, and one tool for each kind and verb.

``relay.mcp_api.assembly.view_tools`` yields them, to be registered beside the relay's other tools::

    for tool in view_tools(fleet=fleet, gateway=gateway, ...):
        relay_tools.register(tool)
"""
