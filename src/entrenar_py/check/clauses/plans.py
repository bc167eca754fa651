"""The scenarios on which a clause is tried if its contract names none.

They are chosen to reveal bugs: unequal shards, sizes that do not divide evenly, two epochs, and SGD
with and without clipping, since clipping would hide a wrong constant factor.
"""

from __future__ import annotations

from typing import Any

from entrenar_py.check.contract import Invariant
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import Scenario


def mlp(**changes: Any) -> Scenario:
    """Return a scenario with 3 workers, 5 shards, and two epochs of 21 digits.

    Batches have 8, 8 and 5 samples. `changes` replaces or adds fields of the scenario.
    """
    usual: dict[str, Any] = {
        "system": "reference",
        "workload": "mlp",
        "world_size": 3,
        "seed": 0,
        "num_shards": 5,
        "num_samples": 21,
        "batch_size": 8,
        "num_steps": 6,
    }
    return Scenario(**{**usual, **changes})


def training(invariant: Invariant) -> list[Scenario]:
    """Plan one run for each optimizer, with clipping off and on."""
    return [
        mlp(),
        mlp(optimizer="momentum", clip_norm=0.05, schedule="cosine", accumulation=2),
        mlp(optimizer="adamw", weight_decay=0.1, dropout=0.2, schedule="linear", warmup_steps=2),
    ]


def movement(invariant: Invariant) -> list[Scenario]:
    """Plan the scenarios of `training` with recorded values.

    The values show whether tensors that did not move had gradients.
    """
    return [scenario.with_(detail="values") for scenario in training(invariant)]


def epochs(invariant: Invariant) -> list[Scenario]:
    """Plan more than two epochs, with sizes that do not divide evenly."""
    return [
        mlp(workload="linear", num_samples=13, batch_size=6, num_steps=8, world_size=4),
        mlp(workload="linear", num_samples=10, batch_size=10, num_steps=3, num_shards=3),
    ]


def non_finite(invariant: Invariant) -> list[Scenario]:
    """Plan runs without a fault, with a gradient near the largest float, and with a NaN or Inf."""
    faults = [
        Fault(kind="non_finite_gradient", step=2, rank=1, element=3, value=value)
        for value in ("nan", "inf", "-inf")
    ]
    faults.append(Fault(kind="non_finite_loss", step=1, rank=2, value="nan"))
    faults.append(
        Fault(
            kind="non_finite_gradient",
            step=1,
            rank=1,
            tensor="output.bias",
            element=9,
            value="nan",
        )
    )
    faults.append(Fault(kind="huge_gradient", step=1, element=0, value="1e38"))
    return [mlp(), *(mlp(faults=(fault,)) for fault in faults)]


def parity(invariant: Invariant) -> list[Scenario]:
    """Plan gradients of 1, 2 and 4 micro-batches, clipping, dropout, and each optimizer.

    Also plan a decoder, a worker that leaves, workers without samples, and one long run.
    """
    return [
        *(mlp(accumulation=count, detail="values") for count in (1, 2, 4)),
        mlp(clip_norm=0.05, detail="values"),
        mlp(dropout=0.2, detail="values"),
        mlp(optimizer="momentum", schedule="linear", detail="values"),
        mlp(optimizer="adamw", learning_rate=0.01, weight_decay=0.1, detail="values"),
        mlp(workload="decoder", learning_rate=0.5, num_steps=3, detail="values"),
        mlp(faults=(Fault(kind="leave", rank=2, step=1),), detail="values"),
        mlp(world_size=8, num_shards=8, num_samples=18, batch_size=5, detail="values"),
        mlp(workload="linear", num_steps=120, learning_rate=0.02),
    ]


def weightings(invariant: Invariant) -> list[Scenario]:
    """Plan the scenarios of `parity` that record the values of gradients."""
    return [scenario for scenario in parity(invariant) if scenario.detail == "values"]


def departures(invariant: Invariant) -> list[Scenario]:
    """Plan a run in which one worker dies, and one in which two die and one of them returns."""
    leave = Fault(kind="leave", rank=1, step=2)
    return [
        mlp(faults=(leave,)),
        mlp(
            optimizer="adamw",
            faults=(
                leave,
                Fault(kind="leave", rank=2, step=3),
                Fault(kind="join", rank=1, step=5),
            ),
        ),
    ]


def stops(invariant: Invariant) -> list[Scenario]:
    """Plan runs that stop several times, within and between epochs, with every type of state."""
    stateful: dict[str, Any] = {"dropout": 0.2, "schedule": "cosine", "warmup_steps": 1}
    return [
        mlp(optimizer="momentum", stops=(4, 5), **stateful),
        mlp(optimizer="adamw", weight_decay=0.1, stops=(1, 3, 4), **stateful),
    ]


def random_streams(invariant: Invariant) -> list[Scenario]:
    """Plan dropout over two epochs, also in micro-batches."""
    return [mlp(dropout=0.3), mlp(dropout=0.3, accumulation=2)]


def step_rules(invariant: Invariant) -> list[Scenario]:
    """Plan every schedule; no clipping, and norms far below and far above the gradient's."""
    return [
        mlp(detail="values"),
        mlp(schedule="linear", warmup_steps=2, clip_norm=0.01, detail="values"),
        mlp(schedule="cosine", clip_norm=100.0, detail="values"),
        mlp(optimizer="momentum", weight_decay=0.1, clip_norm=0.05, detail="values"),
        mlp(optimizer="adamw", learning_rate=0.01, weight_decay=0.1, detail="values"),
        mlp(schedule="linear", faults=(Fault(kind="leave", rank=2, step=3),), detail="values"),
    ]
