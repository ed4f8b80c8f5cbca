"""The nodes of one relay: which leaves and manifests are accepted, and the tools that follow from them.

Its use:

    fleet.offer_identity(node_id, pem)
    fleet.offer_manifest(node_id, wire, "session")
    fleet.connection_changed(node_id, Where.HERE)
    tool = fleet.resolve("echo.01hz….main.echo", rights)  # or the error of the first reason against its use
"""
