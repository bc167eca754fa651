"""Versions and platform of a run, which may explain why two machines give different results."""

from __future__ import annotations

import platform
import sys
from importlib import metadata

import numpy as np
import torch

import entrenar_py


def describe() -> dict[str, str]:
    """Return versions and platform of this process, and the wgpu adapters that it has opened."""
    described = {
        "entrenar": entrenar_py.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "platform": platform.platform(),
    }
    backend = sys.modules.get("entrenar_py.compute.wgpu")  # its import costs 0.2 s
    opened = [] if backend is None else backend.opened()
    if opened:
        titles = [f"{one.device}{', software' if one.software else ''}" for one in opened]
        named = "; ".join(dict.fromkeys(titles))
        described |= {"wgpu": metadata.version("wgpu"), "wgpu_adapter": named}
    return described
