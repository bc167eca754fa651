"""Bugs of a device's kernels and memory, on a stand-in that computes on the CPU.

The stand-in works on every machine and is wrong in the same element every time, so that no mutant's
detection depends on an adapter or on chance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor

from entrenar_py import compute as backends
from entrenar_py.compute import Backend, DropFunction, Model, Pair, Stepper
from entrenar_py.shared.errors import BackendUnavailable
from entrenar_py.shared.mutants import Variant
from entrenar_py.shared.scenario import Scenario
from entrenar_py.systems.probes import memory
from entrenar_py.train.arithmetic import reduction
from entrenar_py.train.arithmetic.tensors import Array, TensorSpec

from .subjects import TRAINING

_fold, _open_backend = reduction.fold, backends.open_backend
OPEN = "entrenar_py.compute.open_backend"
TILE = 16

Product = Callable[[Tensor, Tensor], Tensor]
Change = Callable[[list[Array]], list[Array]]


def as_they_are(arrays: list[Array]) -> list[Array]:
    """Return the gradients unchanged."""
    return arrays


@dataclass(frozen=True)
class StandIn:
    """A backend called `wgpu` that multiplies by `product`, and applies `change` to gradients."""

    product: Product
    change: Change
    name: str = "wgpu"
    device: str = "stand-in"
    software: bool = True
    unit_roundoff: float = 2.0**-23

    def stepper(self, workload: Model, tensors: Mapping[str, Tensor], *, scale: float) -> Stepper:
        """Return the workload's own step, with its gradients changed."""

        def step(ids: Sequence[int], drop: DropFunction) -> tuple[float, list[Array]]:
            loss, arrays = workload.gradients(tensors, ids, drop=drop, scale=scale)
            return loss, self.change(arrays)

        return step

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Apply torch's own linear layer."""
        return F.linear(x, weight, bias)

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """Return `product` of the two operands."""
        return self.product(a, b)

    def products(self, pairs: Sequence[Pair]) -> list[Tensor]:
        """Compute the products one after the other."""
        return [self.product(a, b) for a, b in pairs]


def standing_in(
    product: Product = torch.matmul, change: Change = as_they_are
) -> Callable[[str], Backend]:
    """Return an `open_backend` for a machine whose only device is the stand-in."""

    def open_backend(name: str) -> Backend:
        if name == "wgpu":
            return StandIn(product, change)
        if name == "cuda":
            raise BackendUnavailable("backend cuda: not on this machine")
        return _open_backend(name)

    return open_backend


def corner_skipped(a: Tensor, b: Tensor) -> Tensor:
    """Leaves out the tile that is ragged in both directions."""
    result = a @ b
    rows, columns = (size - size % TILE for size in result.shape)
    result[rows:, columns:] = 0
    return result


def tail_skipped(a: Tensor, b: Tensor) -> Tensor:
    """Stops the sum at the last full tile of k."""
    full = a.shape[1] - a.shape[1] % TILE
    return a[:, :full] @ b[:full]


def strides_ignored(a: Tensor, b: Tensor) -> Tensor:
    """Reads operands in memory order, without their strides."""
    return _as_stored(a) @ _as_stored(b)


def _as_stored(matrix: Tensor) -> Tensor:
    return matrix.t().reshape(matrix.shape) if matrix.t().is_contiguous() else matrix


def swapped(a: Tensor, b: Tensor) -> Tensor:
    """Swaps rows and columns of the result."""
    return (a @ b).t()


def ten_bits(a: Tensor, b: Tensor) -> Tensor:
    """Keeps 10 bits of the operands' mantissa."""
    return _truncated(a) @ _truncated(b)


def _truncated(matrix: Tensor) -> Tensor:
    return (matrix.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


_kept: list[Array] = []


def kept_for_ever(nodes: Iterable[reduction.Node], num_shards: int) -> list[reduction.Node]:
    """Keeps the leaves of the second half of the shards, all on the second worker, in float64."""

    def copied(node: reduction.Node) -> reduction.Node:
        if node.index >= num_shards // 2:
            _kept.append(node.vector.astype(np.float64))
        return node

    return _fold(map(copied, nodes), num_shards)


def weights_only(scenario: Scenario, rank: int, specs: Sequence[TensorSpec]) -> int:
    """Estimates twice the weights: for them and their gradients."""
    return 2 * memory.FLOAT_BYTES * sum(prod(spec.shape) for spec in specs)


def _product(m: int, k: int, n: int, layout: str = "plain") -> Scenario:
    return Scenario(
        system="matmul",
        workload="linear",
        world_size=1,
        seed=0,
        backends=("wgpu",),
        options={"m": m, "k": k, "n": n, "layout": layout},
    )


_BUDGET_BYTES = 3 * 2**28
_MEMORY = Scenario(
    system="memory",
    workload="mlp",
    world_size=2,
    seed=0,
    num_shards=4,
    num_samples=8,
    batch_size=8,
    num_steps=6,
    width=2304,
    options={"budget_bytes": _BUDGET_BYTES},
)


VARIANTS = (
    Variant(
        name="mm-corner",
        summary="the tile at the ragged corner of the result is never written",
        source="classic (workgroups rounded down)",
        plants={OPEN: standing_in(corner_skipped)},
        scenario=_product(17, 31, 17),
        invariants=("F-WGPU-001",),
        place={"tensor": "product", "element": 17 * 17 - 1},
    ),
    Variant(
        name="mm-tail",
        summary="the sum over k stops at the last full tile",
        source="classic (edge of a tile)",
        plants={OPEN: standing_in(tail_skipped)},
        scenario=_product(1, 37, 1),
        invariants=("F-WGPU-001",),
        place={"tensor": "product", "element": 0},
    ),
    Variant(
        name="mm-strides",
        summary="a transposed operand is read in its memory order",
        source="pytorch #118117, #162779",
        plants={OPEN: standing_in(strides_ignored)},
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
        plants={OPEN: standing_in(swapped)},
        scenario=_product(15, 17, 31),
        invariants=("F-WGPU-001",),
        place={"tensor": "product", "expected": "(15, 31)", "got": "(31, 15)"},
    ),
    Variant(
        name="mm-tf32",
        summary="float32 products run with 10 bits of mantissa",
        source="pytorch #67384",
        plants={OPEN: standing_in(ten_bits)},
        scenario=_product(1, 1, 1),
        invariants=("F-WGPU-001",),
        place={"tensor": "product", "element": 0},
    ),
    Variant(
        name="leaves-kept",
        summary="all workers but the first keep their shards' gradients, and exceed their budgets",
        source="classic (leak that rank 0 does not show)",
        plants={f"{TRAINING}.reduction.fold": kept_for_ever},
        scenario=_MEMORY,
        invariants=("F-HET-002",),
        place={"rank": 1, "expected": f"<= {_BUDGET_BYTES}"},
    ),
    Variant(
        name="estimate-of-weights",
        summary="the estimate counts weights and gradients, and forgets intermediate results",
        source="classic",
        plants={"entrenar_py.systems.probes.memory.estimate_bytes": weights_only},
        scenario=_MEMORY.with_(world_size=1, num_steps=2, optimizer="adamw"),
        invariants=("F-HET-002",),
        place={"rank": 0, "expected": f"0 to {8 * 5_483_594}"},  # the model's number of elements
    ),
)
