"""The original system's second wire format: codec, and the coordinator's machine and server.

The format has no authentication and carries no weights: workers hold the weights, and the
coordinator only averages.
"""
