"""The contract between the node and the relay, as documents and as the code that reads them.

Ground floor: imports nothing of ours, opens no socket, runs no loop, reads no clock (time comes in as
an argument, in milliseconds since the epoch) and sets up no logging.
"""
