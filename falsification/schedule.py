"""Bugs in the learning rate as a function of the step."""

from __future__ import annotations

import torch

from entrenar_py.shared.mutants import Variant
from entrenar_py.shared.scenario import Scenario
from entrenar_py.systems import textbook as trainer
from entrenar_py.systems.textbook import Replica, Setup
from entrenar_py.train.arithmetic import optimizer

from .subjects import TEXTBOOK, TRAINING, reference, textbook

_learning_rate = optimizer.learning_rate
_build_scheduler = trainer.build_scheduler


def once_a_rank(setup: Setup, replica: Replica) -> None:
    """Advances the schedule world_size times."""
    for _ in range(setup.scenario.world_size):
        replica.scheduler.step()


def once_a_micro_batch(setup: Setup, replica: Replica) -> None:
    """Advances the schedule once for every micro-batch."""
    for _ in range(setup.scenario.accumulation):
        replica.scheduler.step()


def warm_up_from_zero(
    step: int, *, peak: float, kind: str, warmup_steps: int, num_steps: int
) -> float:
    """Spends the first step at a rate of zero."""
    if step < warmup_steps:
        return peak * step / (warmup_steps + 1)
    return _learning_rate(
        step, peak=peak, kind=kind, warmup_steps=warmup_steps, num_steps=num_steps
    )


def one_ahead(step: int, *, peak: float, kind: str, warmup_steps: int, num_steps: int) -> float:
    """Steps the scheduler before the optimizer."""
    return _learning_rate(
        step + 1, peak=peak, kind=kind, warmup_steps=warmup_steps, num_steps=num_steps
    )


def times_world_size(
    scenario: Scenario, optimizer: torch.optim.Optimizer
) -> torch.optim.lr_scheduler.LambdaLR:
    """Scales the peak rate by the number of ranks, which the scenario does not request."""
    for group in optimizer.param_groups:
        group["lr"] *= scenario.world_size
    return _build_scheduler(scenario, optimizer)


def first_group_alone(setup: Setup, replica: Replica) -> None:
    """Advances the schedule, but the second parameter group keeps its rate."""
    kept = replica.optimizer.param_groups[1]["lr"]
    replica.scheduler.step()
    replica.optimizer.param_groups[1]["lr"] = kept


VARIANTS = (
    Variant(
        name="lr-times-w",
        summary="the scheduler advances world_size times per optimizer step",
        source="accelerate #662, transformers #24088",
        plants={f"{TEXTBOOK}.scheduler_step": once_a_rank},
        scenario=textbook(schedule="linear"),
        invariants=("F-TI-008",),
        place={"step": 1, "rank": 0},
    ),
    Variant(
        name="lr-times-ga",
        summary="the scheduler advances once per micro-batch",
        source="accelerate #999",
        plants={f"{TEXTBOOK}.scheduler_step": once_a_micro_batch},
        scenario=textbook(schedule="cosine", accumulation=2),
        invariants=("F-TI-008",),
        place={"step": 1, "rank": 0},
    ),
    Variant(
        name="warm-up-off-by-one",
        summary="the warm-up starts at a rate of zero, so the first step does nothing",
        source="classic (off by one)",
        plants={f"{TRAINING}.optimizer.learning_rate": warm_up_from_zero},
        scenario=reference(warmup_steps=2),
        invariants=("F-TI-008",),
        place={"step": 0, "rank": 0},
    ),
    Variant(
        name="scheduler-first",
        summary="the scheduler steps before the optimizer",
        source="pytorch lr_scheduler, order as documented since 1.1",
        plants={f"{TRAINING}.optimizer.learning_rate": one_ahead},
        scenario=textbook(schedule="linear"),
        invariants=("F-TI-008",),
        place={"step": 0, "rank": 0},
    ),
    Variant(
        name="lr-scaled-by-w",
        summary="the learning rate is multiplied by the number of ranks without being told to",
        source="classic (linear scaling)",
        plants={f"{TEXTBOOK}.build_scheduler": times_world_size},
        scenario=textbook(),
        invariants=("F-TI-008",),
        place={"step": 0, "rank": 0, "expected": "0.05", "got": "0.1"},
    ),
    Variant(
        name="second-group-constant",
        summary="the schedule reaches the first parameter group only",
        source="classic (parameter groups)",
        plants={f"{TEXTBOOK}.scheduler_step": first_group_alone},
        scenario=textbook(schedule="linear"),
        invariants=("F-TI-008",),
        place={"step": 1, "rank": 0, "tensor": "hidden1.bias"},
    ),
)
