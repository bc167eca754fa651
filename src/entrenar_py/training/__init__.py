"""The arithmetic of training: models and data, shards, the reduction tree, the optimizer.

Pure functions of their arguments: no clock, socket, global random state or scenario in here.
"""
