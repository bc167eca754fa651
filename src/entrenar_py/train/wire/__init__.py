"""The wire protocol without I/O: a codec for messages, and state machines that return effects.

Nothing here uses a clock, socket, process or random number, or does arithmetic on gradients.
"""
