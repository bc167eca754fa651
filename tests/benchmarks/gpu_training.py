"""Training a decoder of 0.78 B parameters on GPUs, with the canonical all-reduce and without.

    CUBLAS_WORKSPACE_CONFIG=:4096:8 torchrun --standalone --nproc_per_node=4 \\
        tests/benchmarks/gpu_training.py speed --dtype bfloat16 --share 1
    for n in 1 2 4; do CUBLAS_WORKSPACE_CONFIG=:4096:8 torchrun --standalone --nproc_per_node=$n \\
        tests/benchmarks/gpu_training.py weights --dtype bfloat16; done

`speed` prints one JSON line: seconds of a step with the hook, of stock DistributedDataParallel with
the same deterministic kernels, and of that with torch's default kernels, rounds in turns; the
slowest rank counts. `weights` prints one: a digest of the weights after some steps, which has to be
the same for every number of ranks, and that of stock DistributedDataParallel.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (as everyone calls it)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import entrenar_py

VOCABULARY, WIDTH, HIDDEN, HEADS, BLOCKS = 32_000, 1536, 4096, 12, 24
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Block(nn.Module):
    """Attention, then a gated feed-forward layer, each on a norm of what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = (nn.Linear(WIDTH, n * WIDTH, bias=False) for n in (3, 1))
        self.up, self.gate = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [batch, length, WIDTH]
        batch, length, _ = x.shape
        heads = self.qkv(self.norms[0](x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each [batch, HEADS, length, WIDTH // HEADS]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        y = self.norms[1](x)
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


class Decoder(nn.Module):
    """Mean loss of guessing each token from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:  # int64 [batch, length]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class Training:
    """One model, its optimizer, and this rank's `share` of micro-batches in every step."""

    def __init__(self, given: argparse.Namespace, *, micro_batches: int, canonical: bool) -> None:
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = Decoder().to(DTYPES[given.dtype])
        self.num_parameters = sum(one.numel() for one in model.parameters())
        self.model = DistributedDataParallel(
            model, gradient_as_bucket_view=True, bucket_cap_mb=given.bucket_mb
        )
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self._share = micro_batches // dist.get_world_size()
        self._shape = (micro_batches, given.batch, given.length)
        self._draws = torch.Generator("cuda").manual_seed(1)
        self._reducer = None
        if canonical:
            self._reducer = entrenar_py.canonical_all_reduce(
                self.model, micro_batches=micro_batches, symmetric_memory=not given.nccl
            )

    def step(self) -> None:
        """One optimizer step."""
        everything = torch.randint(VOCABULARY, self._shape, generator=self._draws, device="cuda")
        first = dist.get_rank() * self._share
        batches = everything[first : first + self._share]
        if self._reducer is not None:
            for batch in self._reducer.fold(batches):
                self.model(batch).backward()
        else:
            for index, batch in enumerate(batches):
                last = index == self._share - 1
                with nullcontext() if last else self.model.no_sync():
                    (self.model(batch) / self._share).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def seconds(step: Callable[[], None], num_steps: int) -> float:
    """Return the seconds of one step on the slowest rank."""
    dist.barrier()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(num_steps):
        step()
    torch.cuda.synchronize()
    slowest = torch.tensor((time.perf_counter() - start) / num_steps, device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def speed(given: argparse.Namespace) -> dict[str, object]:
    """Seconds of a step and ratios of throughput: the hook's to stock, deterministic to default."""
    micro_batches = given.share * dist.get_world_size()
    stock = Training(given, micro_batches=micro_batches, canonical=False)
    ours = Training(given, micro_batches=micro_batches, canonical=True)
    variants = {"ours": (ours, True), "stock": (stock, True), "stock_default": (stock, False)}
    found: dict[str, list[float]] = {name: [] for name in variants}
    for round_ in range(given.rounds + 1):
        for name, (training, deterministic) in variants.items():
            torch.use_deterministic_algorithms(deterministic)
            taken = seconds(training.step, given.steps)
            if round_:  # the first one warms up
                found[name].append(taken)
    best, middle = ({n: f(s) for n, s in found.items()} for f in (min, median))
    return {
        "parameters": ours.num_parameters,
        "share": given.share,
        "throughput": best["stock"] / best["ours"],
        "throughput_median": middle["stock"] / middle["ours"],
        "deterministic_throughput": best["stock_default"] / best["stock"],
        "seconds": best,
        "seconds_median": middle,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def weights(given: argparse.Namespace) -> dict[str, object]:
    """The digests of the weights after `--steps` steps of `--micro-batches` micro-batches."""
    found: dict[str, list[str]] = {}
    num_parameters = 0
    for name, canonical in (("weights", True), ("stock_weights", False)):
        training = Training(given, micro_batches=given.micro_batches, canonical=canonical)
        for _ in range(given.steps):
            training.step()
        digest = hashlib.sha256()
        for one in training.model.module.parameters():
            digest.update(one.detach().view(torch.uint8).cpu().numpy())
        everyone: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(everyone, digest.hexdigest()[:32])
        found[name] = sorted(set(everyone))
        num_parameters = training.num_parameters
        del training
    return {
        "parameters": num_parameters,
        "micro_batches": given.micro_batches,
        "steps": given.steps,
        **found,
    }


def main() -> None:
    """Run the chosen measurement and print it as one line of JSON."""
    cli = argparse.ArgumentParser()
    cli.add_argument("what", choices=["speed", "weights"])
    cli.add_argument("--dtype", default="bfloat16", choices=list(DTYPES))
    cli.add_argument("--bucket-mb", type=int, default=100, help="of DistributedDataParallel")
    cli.add_argument("--nccl", action="store_true", help="not through each other's memory")
    cli.add_argument("--batch", type=int, default=4, help="sequences of a micro-batch")
    cli.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    cli.add_argument("--share", type=int, default=1, help="speed: micro-batches of a rank's step")
    cli.add_argument("--micro-batches", type=int, default=8, help="weights: of all ranks' step")
    cli.add_argument("--steps", type=int, default=5, help="of a round, or of all")
    cli.add_argument("--rounds", type=int, default=6)
    given = cli.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory with NaN finds reads of it; it changes no bit, and takes time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    found = speed(given) if given.what == "speed" else weights(given)
    facts = {
        "what": given.what,
        "symmetric": not given.nccl,
        "bucket_mb": given.bucket_mb,
        "dtype": given.dtype,
        "micro_batch": [given.batch, given.length],
        "world_size": dist.get_world_size(),
        "device": torch.cuda.get_device_name(device),
        "torch": str(torch.__version__),
    }
    if dist.get_rank() == 0:
        print(json.dumps({**facts, **found}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
