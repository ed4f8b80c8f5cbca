"""The call gateway: decides, makes and records every call of every transport.

A transport parses its message and hands over the call; whatever becomes of it, there is one answer::

    call = Call(message, caller.traceparent, caller.correlation_id)
    answer = await gateway.call(CallRequest(caller, call, emit, selection))
    answer.text, answer.result, answer.error  # JSON, and one of the two
"""
