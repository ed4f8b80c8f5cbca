"""Composition of the relay, its status, and what takes effect when the operator decides something.

Its use:

    relay = Relay(environment)  # raises if a table has a row that nothing applies
    await relay.run()
"""
