"""The watch on real GPUs: digests beside copies, a watched step beside one that is not, a drift.

    torchrun --standalone --nproc_per_node=2 tests/benchmarks/watch_on_gpus.py
    python tests/benchmarks/watch_on_gpus.py             # one GPU, no exchange

Prints JSON lines: what the device copies and the kernel reads a second (with other launches of it,
to look for faster ones), seconds a step, and what is found when the last rank drifts. CI runs none
of it. Exits with 1 where a digest is not the CPU's, or the drift is not found.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import entrenar_py
from entrenar_py.compute import digest
from entrenar_py.compute.digest import DigestTable

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
VOCABULARY, WIDTH, LAYERS, HEADS = 151_936, 1024, 36, 16
TOKENS = 1024
LAUNCHES: list[dict[str, int]] = [
    *({"per_program": count} for count in (32, 8, 16, 64, 128)),
    *({"per_program": 32, "maxnreg": count} for count in (128, 96)),
    *({"per_program": 32, "num_warps": count} for count in (2, 8)),
]


class Decoder(nn.Module):
    """0.6 billion parameters, of torch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), False)

    def forward(self, ids: Tensor) -> Tensor:
        """The mean loss of the next token."""
        mask = nn.Transformer.generate_square_subsequent_mask(
            TOKENS, device=ids.device, dtype=torch.bfloat16
        )
        states = self.layers(self.embedding(ids), mask=mask, is_causal=True)
        logits = nn.functional.linear(states[:, :-1], self.embedding.weight)
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def say(**facts: Any) -> None:
    """A line, of the first rank."""
    if RANK == 0:
        print(json.dumps(facts), flush=True)


def seconds(run: Callable[[], object], repeat: int = 10) -> float:
    """On the device, of one of `repeat` runs in a row."""
    start, end = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    start.record()
    for _ in range(repeat):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000 / repeat


def compare_speeds(tensors: Sequence[Tensor]) -> None:
    """The kernel on `tensors` and a copy of a gigabyte, in turns: the median of ten each."""
    source = torch.empty(10**9, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    num_bytes = sum(one.numel() * one.element_size() for one in tensors)
    table = DigestTable(tensors)
    for launch in LAUNCHES:
        table.run(**launch)  # compiled here
        rounds = [
            (seconds(lambda: target.copy_(source)), seconds(lambda: table.run(**launch)))  # noqa: B023
            for _ in range(10)
        ]
        copy, ours = (median(one) for one in zip(*rounds, strict=True))
        say(
            what="digest",
            **launch,
            num_bytes=num_bytes,
            copy_gb_s=2e9 / copy / 1e9,
            digest_gb_s=num_bytes / ours / 1e9,
            ratio=num_bytes / ours / (2e9 / copy),
        )
    start = time.perf_counter()
    for _ in range(100):
        table.run()
    say(what="host", us_per_launch=(time.perf_counter() - start) / 100 * 1e6)


def check_digests(tensors: Sequence[Tensor]) -> bool:
    """Return whether the kernel's digests are the CPU's, on a few tensors."""
    rows = DigestTable(tensors).run()[:, :2].cpu()
    found = [digest.text(row.numpy().tobytes()) for row in rows]
    same = found == [digest.digest(one) for one in tensors]
    say(what="check", tensors=len(tensors), same=same)
    return same


def watch_by_stock(parameters: Sequence[Tensor]) -> Callable[..., None]:
    """The peer: the same questions by torch's own operations, tensor by tensor: a sum of the words
    in place of a digest (which does not see where they stand), finiteness, an exchange.
    """

    def watch(*_: object) -> None:
        sums = [one.detach().view(-1).view(torch.int16).sum() for one in parameters]
        finite = [one.detach().isfinite().all() for one in parameters]
        rows = torch.stack([torch.stack(sums), torch.stack(finite).long()])
        if WORLD > 1:
            dist.all_gather([torch.empty_like(rows) for _ in range(WORLD)], rows)

    return watch


def compare_steps(batch: int, rounds: int, num_steps: int) -> None:
    """Blocks of steps in turns: plain, watched, plain again, watched by stock operations.

    A round's ratio is to the mean of its two plain blocks, whose own ratio says what a percentage
    is worth on that machine. `hook_ms` is what the watch takes of the host's time in a step.
    """
    model: nn.Module = Decoder().to("cuda", torch.bfloat16)
    parameters = list(model.parameters())
    say(what="model", parameters=sum(one.numel() for one in parameters), tensors=len(parameters))
    trained = DistributedDataParallel(model, gradient_as_bucket_view=True) if WORLD > 1 else model
    ids = torch.randint(0, VOCABULARY, (batch, TOKENS), device="cuda")
    arms = {
        name: torch.optim.AdamW(parameters, lr=1e-4, fused=True)
        for name in ("plain", "watched", "again", "stock")
    }
    in_hook: list[float] = []
    arms["watched"].register_step_post_hook(lambda *_: in_hook.append(time.perf_counter()))
    observation = entrenar_py.observe(model, arms["watched"], every=1, patience=10**9)
    arms["watched"].register_step_post_hook(
        lambda *_: in_hook.append(time.perf_counter() - in_hook.pop())
    )
    arms["stock"].register_step_post_hook(watch_by_stock(parameters))

    def block(optimizer: torch.optim.Optimizer) -> None:
        for _ in range(num_steps):
            trained(ids).backward()
            optimizer.step()
            optimizer.zero_grad()

    taken: dict[str, list[float]] = {name: [] for name in arms}
    for index, name in ((index, name) for index in range(rounds + 1) for name in arms):
        torch.cuda.synchronize()
        start = time.perf_counter()
        block(arms[name])
        torch.cuda.synchronize()
        if index:  # the first is for compiling and allocating
            taken[name].append((time.perf_counter() - start) / num_steps)
    observation.close()
    by_round = [dict(zip(taken, one, strict=True)) for one in zip(*taken.values(), strict=True)]

    def percent(name: str) -> list[float]:
        """Quartiles, over rounds, of what `name` takes more than plain steps."""
        more = [100 * (2 * of[name] / (of["plain"] + of["again"]) - 1) for of in by_round]
        return [round(one, 2) for one in quantiles(more, n=4)]

    say(
        what="step",
        world_size=WORLD,
        tokens=batch * TOKENS,
        **{f"{name}_ms": round(1000 * median(one), 2) for name, one in taken.items()},
        **{f"{name}_fastest_ms": round(1000 * min(one), 2) for name, one in taken.items()},
        watch_percent=percent("watched"),
        noise_percent=percent("again"),
        stock_percent=percent("stock"),
        hook_ms=[round(1000 * one, 2) for one in quantiles(in_hook, n=4)],
        watched=[f"{one.clause}: {one.comparisons}" for one in observation.watched()],
    )


def find_drift() -> bool:
    """Return whether every rank stops one step after the last rank drifted."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))).to("cuda", torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    observation = entrenar_py.observe(model, optimizer, every=1)
    try:
        for step in range(6):
            if step == 3 and RANK == WORLD - 1:
                drift = 1.0 if WORLD > 1 else float("nan")
                next(model[2].parameters()).data[7, 7] += drift
            torch.manual_seed(step)
            model(torch.randn(8, 512, device="cuda").bfloat16()).square().mean().backward()
            for one in model.parameters():
                if WORLD > 1:
                    dist.all_reduce(one.grad)
            optimizer.step()
            optimizer.zero_grad()
        observation.close()
    except entrenar_py.WatchFinding as found:
        say(what="drift", found=str(found), raised_in_step=step)
        return (found.step, found.tensor) == (3, "2.weight" if WORLD > 1 else "0.weight")
    say(what="drift", found=None)
    return False


def main() -> int:
    """1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only-steps", action="store_true", help="time no digests")
    given = parser.parse_args()
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if WORLD > 1:
        dist.init_process_group("nccl")
    say(what="device", name=torch.cuda.get_device_name(), torch=str(torch.__version__))
    few = [torch.randn(size, device="cuda") for size in (1, 5000, 3_000_001)]
    right = check_digests([*few, few[1].bfloat16(), few[2][1:].half(), few[1].double()])
    if not given.only_steps:
        with torch.device("meta"):
            shapes = [one.shape for one in Decoder().parameters()]
        compare_speeds([torch.randn(one, device="cuda").bfloat16() for one in shapes])
    right = find_drift() and right
    compare_steps(given.batch, given.rounds, given.steps)
    if WORLD > 1:
        dist.destroy_process_group()
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
