"""The place of a run: the part of a trace that explains a difference between two machines."""

from __future__ import annotations

import platform
import sys

import numpy as np
import torch

import entrenar_py


def describe() -> dict[str, str]:
    """Versions and platform of this process; the wgpu adapter too, if one was opened in it."""
    described = {
        "entrenar": entrenar_py.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "platform": platform.platform(),
    }
    backend = sys.modules.get("entrenar_py.backends.wgpu")  # its import costs 0.2 s
    opened = [] if backend is None else backend.opened()
    if opened:
        import wgpu  # not before: whoever opened no adapter may not have it

        adapters = [f"{one.device}{', software' if one.software else ''}" for one in opened]
        named = "; ".join(dict.fromkeys(adapters))
        described |= {"wgpu": wgpu.__version__, "wgpu_adapter": named}
    return described
