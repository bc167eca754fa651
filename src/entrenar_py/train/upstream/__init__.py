"""The original system's second wire layout, without I/O: a codec, and the coordinator's machine.

It has no authentication and carries no weights: workers hold these, the coordinator only averages.
"""
