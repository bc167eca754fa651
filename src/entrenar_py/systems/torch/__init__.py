"""Trainers over torch.distributed: each rank a process of its own, recorded by `observe`."""
