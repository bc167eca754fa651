"""Reads the weights in a folder's safetensors files."""

from __future__ import annotations

from pathlib import Path

from safetensors.numpy import load_file

from entrenar_py.train.arithmetic.tensors import Array


def weights_of(folder: Path) -> dict[str, Array]:
    """Return all weights in the safetensors files of a folder, by name."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: array for file in files for name, array in load_file(file).items()}
