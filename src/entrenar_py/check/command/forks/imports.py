"""What is imported before any fork, and what the imports have read, set and begun."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

# As far as they exist. The first optimizer of a process would import the second.
FIRST = (
    *("torch", "torch._dynamo.aot_compile", "torch.distributed.run", "torch.nn.parallel"),
    *("torch.utils.data", "numpy.random"),
    *("entrenar_py.check.observing.observer", "entrenar_py.check.observing.seen_samples"),
    *("entrenar_py.check.observing.auto.beginning", "entrenar_py.check.observing.auto.recorder"),
    *("entrenar_py.check.observing.auto.follower", "entrenar_py.check.observing.torch_calls"),
)
# Variables that differ from rank to rank or from run to run.
RANKS = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "NODE_RANK", "PWD"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
)
PREFIXES = ("TORCHELASTIC_", "ENTRENAR_", "ACCELERATE_", "FSDP_")


class Imports:
    """What was imported before any fork, and what this read.

    - `before`: the environment at the start, `changed` what the imports have set in it since.
    - `names`: the variables that imports read, as far as they did it in Python.
    - `files`: the descriptors that are open because of them.
    """

    def __init__(self) -> None:
        self.before = dict(os.environ)
        self.names: set[str] = set()
        self.changed: dict[str, str] = {}
        self.files: set[int] = set()

    def make(
        self,
        first: Sequence[str],
        script: Sequence[tuple[str, tuple[str, ...]]],
        without: Sequence[str],
    ) -> str:
        """Import `first` and what the script imports; return a package to leave out, or "".

        A package is left out if it reads at its import which rank it is in, if threads remain, or
        if it has begun to use CUDA. Raises ImportError if that is so of `first`.
        """
        gc.disable()  # a quarter of the time: modules stay, and there are ever more to look through
        self._import([(name, ()) for name in first])
        if why := self._why_not():
            raise ImportError(f"torch {why}")
        for module, names in script:
            top = module.partition(".")[0]
            if top not in without:
                self._import([(module, names)])
                if self._why_not():
                    return top
        self.changed = {
            name: text for name, text in os.environ.items() if self.before.get(name) != text
        }
        sys.stdout.flush()
        gc.collect()
        gc.freeze()  # whatever looks through all objects passes over these, and copies no page
        gc.enable()
        return ""

    def _import(self, modules: Sequence[tuple[str, tuple[str, ...]]]) -> None:
        with _read_noted(self.names):
            for module, names in modules:
                # What can't be imported here, the script will find so itself.
                with suppress(Exception):
                    imported = importlib.import_module(module)
                    for name in names:
                        with suppress(Exception):
                            getattr(imported, name)  # some packages import it only now

    def _why_not(self) -> str:
        """Return why no rank can be forked after the latest import; "" if one can."""
        read = sorted(name for name in self.names if name in RANKS)
        if read:
            return f"reads {read[0]} as it is imported"
        pid = os.fork()  # at which OpenBLAS ends its threads, and CUDA notes that it is there
        if pid == 0:
            os._exit(int(_has_begun_cuda()))
        _, status = os.waitpid(pid, 0)
        if status:
            return "uses CUDA as it is imported"
        return "has threads" if len(os.listdir("/proc/self/task")) > 1 else ""


def _has_begun_cuda() -> bool:
    """Return whether this process, which was just forked, can't use CUDA any more."""
    torch = sys.modules.get("torch")
    return torch is not None and getattr(torch._C, "_cuda_isInBadFork", lambda: False)()


@contextmanager
def _read_noted(names: set[str]) -> Iterator[None]:
    """Add to `names` the variables that are read meanwhile."""
    read = os._Environ.__getitem__

    def noted(self: Any, key: Any) -> Any:
        names.add(key)
        return read(self, key)

    os._Environ.__getitem__ = noted  # type: ignore[method-assign]
    try:
        yield
    finally:
        os._Environ.__getitem__ = read  # type: ignore[method-assign]
