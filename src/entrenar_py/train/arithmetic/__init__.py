"""The arithmetic of training: models and data, shards, the reduction tree, the optimizer.

No function uses a clock, a socket, global random state or a plan.
"""
