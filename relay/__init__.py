"""The hub: verifies manifests, shows tools to agents, and routes each call to the one node.

Imports ``schemas``, never ``kubelet``.
"""
