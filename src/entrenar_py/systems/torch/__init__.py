"""Trainers over torch.distributed: each rank is a process, recorded by `observe`."""
