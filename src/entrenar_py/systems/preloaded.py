"""Modules that the parent of all worker processes has loaded, whichever system starts it: there is
one for a process, and what it lacks every worker would have to import for itself.
"""

MODULES = (
    "entrenar_py.observing.observer",
    "entrenar_py.systems.torch.ranks",
    "entrenar_py.systems.star.worker_process",
    "entrenar_py.training.decoder",
    "torch._dynamo.aot_compile",  # which the first optimizer of a process loads
    "torch.nn.parallel",
)
