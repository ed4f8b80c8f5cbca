"""Caller tools: sessions of agents with nodes, and the tools that an agent lends to a node's local agent.

``SessionTools`` are ``session_message``, ``session_events`` and ``caller_tool_response``; ``CallerSessions``
runs their calls. ``NodeRequests`` handles the nodes' frames,
``Endings`` ends requests and sessions, ``Expiry`` finds those that are over, and ``EventStreams`` sends
events to callers.
"""
