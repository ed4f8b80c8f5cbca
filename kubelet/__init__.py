"""The node: announces what it can do, holds one outbound connection, and runs what comes down it.

Imports ``schemas``, never ``relay``.
"""
