"""Bugs of a device's kernels and memory, on a stand-in that computes on the CPU.

A stand-in is there on every machine and wrong in the same element every time, so that no kill
depends on an adapter or on luck.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor

from entrenar_py import backends
from entrenar_py.backends import Backend, Pair
from entrenar_py.errors import BackendUnavailable
from entrenar_py.mutants import Variant
from entrenar_py.scenario import Scenario
from entrenar_py.systems import manifest
from entrenar_py.training import reduction, workload

from .subjects import TRAINING

_gradient_entries, _open_backend = manifest.gradient_entries, backends.open_backend
_fold = reduction.fold
_OPEN = "entrenar_py.backends.open_backend"
TILE = 16

Entries = tuple[tuple[str, tuple[int, ...], str], ...]


@dataclass(frozen=True)
class StandIn:
    """A backend that calls itself `wgpu` and multiplies by `product`."""

    product: Callable[[Tensor, Tensor], Tensor]
    name: str = "wgpu"
    device: str = "stand-in"
    software: bool = True
    unit_roundoff: float = 2.0**-23

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """torch's own, which no mutant here touches."""
        return F.linear(x, weight, bias)

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """`product` of the two."""
        return self.product(a, b)

    def products(self, pairs: Sequence[Pair]) -> list[Tensor]:
        """One after the other."""
        return [self.product(a, b) for a, b in pairs]


def standing_in(product: Callable[[Tensor, Tensor], Tensor]) -> Callable[[str], Backend]:
    """`open_backend` on a machine whose only device multiplies by `product`."""

    def open_backend(name: str) -> Backend:
        if name == "wgpu":
            return StandIn(product)
        if name == "cuda":
            raise BackendUnavailable("backend cuda: not on this machine")
        return _open_backend(name)

    return open_backend


def corner_skipped(a: Tensor, b: Tensor) -> Tensor:
    """The tile that is ragged in both directions is never written."""
    result = a @ b
    rows, columns = (size - size % TILE for size in result.shape)
    result[rows:, columns:] = 0
    return result


def tail_skipped(a: Tensor, b: Tensor) -> Tensor:
    """The sum stops at the last full tile of k."""
    full = a.shape[1] - a.shape[1] % TILE
    return a[:, :full] @ b[:full]


def strides_ignored(a: Tensor, b: Tensor) -> Tensor:
    """Operands are read as they lie in memory."""
    return _as_stored(a) @ _as_stored(b)


def _as_stored(matrix: Tensor) -> Tensor:
    return matrix.t().reshape(matrix.shape) if matrix.t().is_contiguous() else matrix


def swapped(a: Tensor, b: Tensor) -> Tensor:
    """Rows and columns of the result change places."""
    return (a @ b).t()


def ten_bits(a: Tensor, b: Tensor) -> Tensor:
    """Operands keep 10 bits of mantissa."""
    return _truncated(a) @ _truncated(b)


def _truncated(matrix: Tensor) -> Tensor:
    return (matrix.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def reordered(scenario: Scenario, model: workload.Workload, backend: Backend) -> Entries:
    """The device lists its gradients from the last layer to the first."""
    entries = _gradient_entries(scenario, model, backend)
    return entries[::-1] if backend.name == "wgpu" else entries


def halved(scenario: Scenario, model: workload.Workload, backend: Backend) -> Entries:
    """The device keeps gradients of biases in half precision."""
    entries = _gradient_entries(scenario, model, backend)
    if backend.name != "wgpu":
        return entries
    return tuple(
        (name, shape, "float16" if len(shape) == 1 else dtype) for name, shape, dtype in entries
    )


_kept: list[reduction.Node] = []


def kept_for_ever(nodes: Iterable[reduction.Node], num_shards: int) -> list[reduction.Node]:
    """Keeps a copy of every leaf that was ever folded."""

    def copied(node: reduction.Node) -> reduction.Node:
        copy = reduction.Node(node.level, node.index, node.vector.copy(), node.loss, node.weight)
        _kept.append(copy)
        return node

    return _fold(map(copied, nodes), num_shards)


def _product(m: int, k: int, n: int, layout: str = "plain") -> Scenario:
    return Scenario(
        system="matmul",
        workload="linear",
        world_size=1,
        seed=0,
        backends=("wgpu",),
        options={"m": m, "k": k, "n": n, "layout": layout},
    )


_MANIFEST = Scenario(system="manifest", workload="mlp", world_size=1, seed=0)
_MEMORY = Scenario(
    system="memory",
    workload="mlp",
    world_size=2,
    seed=0,
    num_shards=4,
    num_samples=64,
    batch_size=64,
    num_steps=6,
    width=2048,
    options={"budget_bytes": 2 * 2**30},
)

VARIANTS = (
    Variant(
        name="mm-corner",
        summary="the tile at the ragged corner of the result is never written",
        source="classic (workgroups rounded down)",
        plants={_OPEN: standing_in(corner_skipped)},
        scenario=_product(17, 31, 17),
        invariants=("F-WGPU-001",),
        place={"tensor": "product", "element": 17 * 17 - 1},
    ),
    Variant(
        name="mm-tail",
        summary="the sum over k stops at the last full tile",
        source="classic (edge of a tile)",
        plants={_OPEN: standing_in(tail_skipped)},
        scenario=_product(1, 37, 1),
        invariants=("F-WGPU-001",),
        place={"tensor": "product", "element": 0},
    ),
    Variant(
        name="mm-strides",
        summary="a transposed operand is read as it lies in memory",
        source="pytorch #118117, #162779",
        plants={_OPEN: standing_in(strides_ignored)},
        scenario=_product(1, 15, 1).with_(
            options={"shapes": [[2, 1, 2], [2, 2, 1]], "layout": "a_transposed"}
        ),
        invariants=("F-WGPU-001",),
        place={"tensor": "product"},
    ),
    Variant(
        name="mm-swapped",
        summary="the result has its rows and columns swapped",
        source="classic",
        plants={_OPEN: standing_in(swapped)},
        scenario=_product(15, 17, 31),
        invariants=("F-WGPU-001",),
        place={"tensor": "product", "expected": "(15, 31)", "got": "(31, 15)"},
    ),
    Variant(
        name="mm-tf32",
        summary="float32 products run with 10 bits of mantissa",
        source="pytorch #67384",
        plants={_OPEN: standing_in(ten_bits)},
        scenario=_product(1, 1, 1),
        invariants=("F-WGPU-001",),
        place={"tensor": "product", "element": 0},
    ),
    Variant(
        name="manifest-order",
        summary="one backend lists its gradients in another order",
        source="classic",
        plants={
            _OPEN: standing_in(torch.matmul),
            "entrenar_py.systems.manifest.gradient_entries": reordered,
        },
        scenario=_MANIFEST,
        invariants=("F-HET-001",),
        place={"tensor": "hidden1.weight"},
    ),
    Variant(
        name="manifest-dtype",
        summary="one backend keeps the gradients of biases in half precision",
        source="classic",
        plants={
            _OPEN: standing_in(torch.matmul),
            "entrenar_py.systems.manifest.gradient_entries": halved,
        },
        scenario=_MANIFEST,
        invariants=("F-HET-001",),
        place={"tensor": "hidden1.bias"},
    ),
    Variant(
        name="leaves-kept",
        summary="a worker keeps every shard's gradient, and grows from step to step",
        source="classic (leak)",
        plants={f"{TRAINING}.reduction.fold": kept_for_ever},
        scenario=_MEMORY,
        invariants=("F-HET-002",),
        place={"rank": 0},
    ),
)
