"""A training loop of your own, judged by its trace.

Two replicas of a small torch model in one process. The loop records what it did with
`entrenar_py.trace`; `entrenar-check --judge` does the rest:

    python examples/own_trainer.py trace.jsonl
    entrenar-check --contract distributed-training-v1.yaml --only F-DP-001 --judge trace.jsonl

With `--forget-sync` the second replica keeps its own gradient, as if its hooks had never been
armed: the loss still falls, and F-DP-001 is falsified in step 0.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from entrenar_py import trace
from entrenar_py.scenario import Scenario

RANKS = 2
SCENARIO = Scenario(
    system="own_trainer",  # any name: judging runs nothing
    workload="own",
    world_size=RANKS,
    num_shards=RANKS,
    seed=0,
    num_samples=10,
    batch_size=5,  # 3 samples on rank 0, 2 on rank 1: unequal on purpose
    num_steps=4,
    learning_rate=0.1,
)


def records(model: torch.nn.Module) -> trace.Tensors:
    """All parameters, with their values, so that a finding can show the element that differs."""
    return {
        name: trace.record_tensor(parameter.detach().numpy(), values=True)
        for name, parameter in model.named_parameters()
    }


def train(*, forget_sync: bool) -> trace.Trace:
    """Four steps of synchronous SGD over two epochs; the trace of them."""
    data = torch.arange(10.0).reshape(10, 1) / 10
    torch.manual_seed(SCENARIO.seed)
    models = [torch.nn.Linear(1, 1) for _ in range(RANKS)]
    models[1].load_state_dict(models[0].state_dict())
    events: list[trace.Event] = [
        trace.Start(step=0, rank=rank, weights=records(model), trainable=("weight", "bias"))
        for rank, model in enumerate(models)
    ]
    for step in range(SCENARIO.num_steps):
        epoch, start = divmod(step * SCENARIO.batch_size, SCENARIO.num_samples)
        batch = range(start, start + SCENARIO.batch_size)
        sums = []
        for rank, ids in enumerate((batch[:3], batch[3:])):
            x = data[list(ids)]
            loss = torch.nn.functional.mse_loss(models[rank](x), 2 * x + 1, reduction="sum")
            models[rank].zero_grad()
            (loss / SCENARIO.batch_size).backward()  # type: ignore[no-untyped-call]
            sums.append(loss.item())
            events.append(
                trace.Shard(
                    step=step,
                    epoch=epoch,
                    rank=rank,
                    shard=rank,
                    ids=tuple(ids),
                    loss_sum=loss.item(),
                    weight=len(ids),
                    finite=bool(loss.isfinite()),
                )
            )
        for parameters in zip(*(model.parameters() for model in models), strict=True):
            total = torch.stack([p.grad for p in parameters if p.grad is not None]).sum(0)
            for parameter in parameters[: 1 if forget_sync else RANKS]:
                parameter.grad = total.clone()
        for rank, model in enumerate(models):
            torch.optim.SGD(model.parameters(), lr=SCENARIO.learning_rate).step()
            events.append(
                trace.Update(
                    step=step,
                    rank=rank,
                    loss=sum(sums) / SCENARIO.batch_size,
                    weight=SCENARIO.batch_size,
                    learning_rate=SCENARIO.learning_rate,
                    finite=all(bool(p.isfinite().all()) for p in model.parameters()),
                    weights=records(model),
                )
            )
    events.append(trace.End(status="completed"))
    return trace.Trace(scenario=SCENARIO, environment={}, promises=(), events=tuple(events))


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("file", type=Path, help="where the trace goes")
    arguments.add_argument("--forget-sync", action="store_true", help="plant the bug")
    options = arguments.parse_args()
    trace.save(train(forget_sync=options.forget_sync), options.file)
