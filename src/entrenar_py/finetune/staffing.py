"""The worker processes of a run on this machine: what they load ahead."""

from __future__ import annotations

from collections.abc import Sequence

from entrenar_py import backends
from entrenar_py.drivers import processes

_WORKER = "entrenar_py.finetune.worker_process"
# These look for CUDA devices when they are imported, and no fork of a process that did can use one.
_OF_THE_CPU = ("transformers", "peft")


def preloaded(names: Sequence[str]) -> tuple[str, ...]:
    """Return the modules that workers on the backends `names` are forked with."""
    uses_cuda = any(backends.kind_of(name) == "cuda" for name in names)
    return (_WORKER,) if uses_cuda else (_WORKER, *_OF_THE_CPU)


def load_ahead(names: Sequence[str]) -> None:
    """Let what workers on the backends `names` need be loaded while this process loads the same."""
    processes.load_ahead(preloaded(names))
