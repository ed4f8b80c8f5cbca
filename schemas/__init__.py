"""The contract between the node and the relay, as documents and as the code that reads them.

The lowest layer: imports no other package of the project, opens no socket, runs no loop, reads no clock (time
is an argument, in milliseconds since the epoch) and sets up no logging.
"""
