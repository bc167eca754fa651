"""The cost of a tensor's digest on one core, and of watching a step."""

from __future__ import annotations

from collections.abc import Callable

import torch
import xxhash

import entrenar_py
from entrenar_py.compute import digest

NUM_BYTES = 256 * 2**20


def test_digest_against_one_call(
    beside: Callable[..., list[float]], say: Callable[[str], None]
) -> None:
    """256 MiB that lie in memory, in chunks; and the library's hash of all of it in one call."""
    tensor = torch.randn(NUM_BYTES // 4)
    seconds = beside(
        "digest of 256 MiB / XXH3-128 in one call",
        ours=lambda: digest.digest(tensor),
        peer=lambda: xxhash.xxh3_128_digest(digest.memory(tensor)),
        rounds=9,
    )
    say(f"digest: {NUM_BYTES / min(seconds) / 1e9:.1f} GB/s on one core (goal 5)")


def test_watched_step(beside: Callable[..., list[float]]) -> None:
    """One process, 34 million parameters, batch 64, AdamW: a step watched, and one that is not."""
    torch.set_num_threads(1)
    layers = [torch.nn.Linear(2048, 2048) for _ in range(8)]
    model = torch.nn.Sequential(*layers)
    given = torch.randn(64, 2048)
    plain, watched = (torch.optim.AdamW(model.parameters(), fused=True) for _ in range(2))
    observation = entrenar_py.observe(model, watched, every=1)

    def step(optimizer: torch.optim.Optimizer) -> None:
        model(given).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    beside(
        "a step that is watched / one that is not",
        ours=lambda: step(watched),
        peer=lambda: step(plain),
        rounds=9,
    )
    observation.close()
