"""The listener, the protocols on it, and the checks in front of every route.

Use::

    with bind(config.listen) as listener:
        await serve(guard, listener, connections, tls)
"""
