"""The records of tensors whose values are not kept: sketches and digests, on a GPU by kernels."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from entrenar_py.check.observing.sketches import DTYPES, first_of, sketch
from entrenar_py.check.observing.sketches_on_gpu import SketchesOnGpu
from entrenar_py.check.rank_files.layout import Piece
from entrenar_py.check.watch import digest
from entrenar_py.shared.trace import TensorRecord, record_sketch


class Sketches:
    """Makes the records of tensors whose values are not kept.

    It keeps tables on the GPU from one call to the next, for tensors that stay where they are.
    """

    def __init__(self) -> None:
        self._gpu: dict[torch.device, SketchesOnGpu] = {}

    def records(
        self, named: Mapping[str, Tensor], pieces: Mapping[str, Piece], *, exact: bool
    ) -> dict[str, TensorRecord]:
        """Return the record of each tensor, which this rank holds whole, or as its piece.

        With `exact` its digest is that of all bits, else that of the sketch: two gradients that
        differ by less than the rounding of a float64 sum may then have the same digest. A tensor
        that isn't of floating point has no sketch, and always the digest of all bits.
        """
        records: dict[str, TensorRecord] = {}
        by_gpu: dict[torch.device, dict[str, Tensor]] = {}
        for name, tensor in named.items():
            piece = pieces.get(name)
            fits = tensor.dtype in DTYPES and (piece is None or first_of(tensor, piece) is not None)
            if fits and _is_on_gpu(tensor):
                by_gpu.setdefault(tensor.device, {})[name] = tensor
            else:
                records[name] = _record(tensor, piece, exact=exact)
        for device, chosen in by_gpu.items():
            records |= self._of(device).records(chosen, pieces, exact=exact)
        return {name: records[name] for name in named}

    def digests(self, named: Mapping[str, Tensor]) -> dict[str, TensorRecord]:
        """Return records that have only the digest of all bits."""
        records: dict[str, TensorRecord] = {}
        by_gpu: dict[torch.device, dict[str, Tensor]] = {}
        for name, tensor in named.items():
            if _is_on_gpu(tensor):
                by_gpu.setdefault(tensor.device, {})[name] = tensor
            else:
                records[name] = TensorRecord(digest.digest(tensor))
        for device, chosen in by_gpu.items():
            bits = self._of(device).bits([*chosen.values()])
            records |= {name: TensorRecord(text) for name, text in zip(chosen, bits, strict=True)}
        return {name: records[name] for name in named}

    def _of(self, device: torch.device) -> SketchesOnGpu:
        return self._gpu.setdefault(device, SketchesOnGpu())


def _is_on_gpu(tensor: Tensor) -> bool:
    """Return whether kernels read a tensor; without Triton the same is computed step by step."""
    return tensor.is_cuda and _has_triton()


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _record(tensor: Tensor, piece: Piece | None, *, exact: bool) -> TensorRecord:
    if tensor.dtype not in DTYPES:
        return TensorRecord(digest.digest(tensor))
    # Hundreds of small operations. A mode that heard each would take a third of a step, and one of
    # the script's may put new tensors on another device.
    with torch._C.DisableTorchFunction():
        bits = digest.digest(tensor) if exact else None
        return record_sketch(sketch(tensor, piece), DTYPES[tensor.dtype], bits)
