"""The listener, the protocols on it, and the checks in front of every route.

Use::

    part = assemble(environment, audit, auth, served)
    with bind(config.listen) as listener:
        await serve(part.application, listener, part.connections, tls, begin=part.application.begin)
"""
