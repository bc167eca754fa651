"""The arithmetic of training: models and data, shards, the reduction tree, the optimizer.

Every function is pure. None uses a clock, a socket, global random state or a scenario.
"""
