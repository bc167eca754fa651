"""The protocol, sans-I/O: bytes to messages, and the machines that say what follows from a message.

No clock, socket, process, randomness or arithmetic in here: whoever drives a machine brings them.
"""
