"""A training loop of your own, judged by its trace.

Replicas of a small torch model in one process, one per rank. The loop records what it did with
`entrenar_py.trace`; `entrenar-check --judge` does the rest:

    python examples/own_trainer.py trace.jsonl
    entrenar-check --contract distributed-training-v1.yaml --only F-DP-001 --judge trace.jsonl

With --forget-sync the last rank keeps its own gradient, as if its hooks had never been armed: the
loss still falls, and F-DP-001 is falsified in step 0.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from entrenar_py import trace
from entrenar_py.trace import Scenario


def scenario_of(num_ranks: int) -> Scenario:
    """The scenario to be run. Two epochs of two batches; 7 samples never divide evenly."""
    return Scenario(
        system="own_trainer",  # any name: judging runs nothing
        workload="own",
        world_size=num_ranks,
        num_shards=num_ranks,
        seed=0,
        num_samples=14,
        batch_size=7,
        num_steps=4,
        learning_rate=0.1,
    )


def records(model: torch.nn.Module) -> trace.Tensors:
    """All parameters, with their values, so that a finding can show the element that differs."""
    return {
        name: trace.record_tensor(parameter.detach().numpy(), values=True)
        for name, parameter in model.named_parameters()
    }


def shard(
    model: torch.nn.Module, ids: Sequence[int], *, scenario: Scenario, step: int, rank: int
) -> trace.Shard:
    """Adds this rank's part of the batch's mean gradient to `model`; what is recorded of it."""
    x = torch.tensor([[sample / scenario.num_samples] for sample in ids])
    loss = torch.nn.functional.mse_loss(model(x), 2 * x + 1, reduction="sum")
    (loss / scenario.batch_size).backward()  # type: ignore[no-untyped-call]
    return trace.Shard(
        step=step,
        epoch=step * scenario.batch_size // scenario.num_samples,
        rank=rank,
        shard=rank,
        ids=tuple(ids),
        loss_sum=loss.item(),
        weight=len(ids),
        finite=bool(loss.isfinite()),
    )


def synchronise(models: Sequence[torch.nn.Module], *, forget_last: bool) -> None:
    """Gives every replica the sum of all gradients; `forget_last` is the planted bug."""
    for parameters in zip(*(model.parameters() for model in models), strict=True):
        total = torch.stack([p.grad for p in parameters if p.grad is not None]).sum(0)
        for parameter in parameters[:-1] if forget_last else parameters:
            parameter.grad = total.clone()


def train(scenario: Scenario, *, forget_sync: bool) -> trace.Trace:
    """Synchronous SGD as `scenario` says; the trace of it."""
    ranks, size = range(scenario.world_size), scenario.batch_size
    cuts = [size * rank // len(ranks) for rank in (*ranks, len(ranks))]
    torch.manual_seed(scenario.seed)
    models = [torch.nn.Linear(1, 1) for _ in ranks]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), lr=scenario.learning_rate) for m in models]
    events: list[trace.Event] = [
        trace.Start(step=0, rank=rank, weights=records(models[rank]), trainable=("weight", "bias"))
        for rank in ranks
    ]
    for step in range(scenario.num_steps):
        first = step * size % scenario.num_samples
        shards = []
        for rank in ranks:
            optimizers[rank].zero_grad()
            ids = range(first + cuts[rank], first + cuts[rank + 1])
            shards.append(shard(models[rank], ids, scenario=scenario, step=step, rank=rank))
        synchronise(models, forget_last=forget_sync)
        events += shards
        for rank in ranks:
            optimizers[rank].step()
            events.append(
                trace.Update(
                    step=step,
                    rank=rank,
                    loss=sum(one.loss_sum or 0.0 for one in shards) / size,
                    weight=size,
                    learning_rate=scenario.learning_rate,
                    finite=all(bool(p.isfinite().all()) for p in models[rank].parameters()),
                    weights=records(models[rank]),
                )
            )
    events.append(trace.End(status="completed"))
    return trace.Trace(scenario=scenario, environment={}, promises=(), events=tuple(events))


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains and writes the trace."""
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_argument("file", type=Path, help="where the trace goes")
    cli.add_argument("--ranks", type=int, default=2, choices=range(2, 7), help="2 by default")
    cli.add_argument("--forget-sync", action="store_true", help="plant the bug")
    given = cli.parse_args(arguments)
    trace.save(train(scenario_of(given.ranks), forget_sync=given.forget_sync), given.file)


if __name__ == "__main__":
    main()
