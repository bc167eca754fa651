"""Weights have the same bits on 1 to 4 ranks, but not with a bug in the reduction."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from tests.train.canonical import ranks

ROOT = Path(__file__).resolve().parents[3]


Digests = dict[str, dict[str, list[str]]]  # {variant: {world size: [of each rank]}}


def trained(kind: str, variants: Iterable[str]) -> Digests:
    """Return the digests of the final weights of each of `variants`, trained on real ranks."""
    settings = {"OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    found = subprocess.run(
        [sys.executable, "-m", "tests.train.canonical.ranks", kind, *variants],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", **settings},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr
    return dict(json.loads(found.stdout))


@pytest.fixture(scope="module")
def digests() -> Digests:
    """Train all variants on CPUs, with and without planted bugs."""
    return trained("cpu", ranks.VARIANTS.keys() - ranks.ON_GPUS)


@pytest.mark.parametrize("variant", [*ranks.RIGHT, *ranks.RIGHT_SHARDED])
def test_the_same_bits_on_any_world_size(digests: Digests, variant: str) -> None:
    """The bits are the same on any world size, for all dtypes, buckets and weight layouts."""
    found = digests[variant]
    sizes = ("1", "2", "3", "4") if variant in ranks.UNEVEN else ("1", "2", "4")
    assert {size: len(of_ranks) for size, of_ranks in found.items()} == {
        size: int(size) for size in sizes
    }
    assert len(bits(found)) == 1


def bits(of_sizes: dict[str, list[str]]) -> set[str]:
    """Return the different digests of all ranks, on any world size."""
    return {digest for of_ranks in of_sizes.values() for digest in of_ranks}


def test_buckets_change_no_bit(digests: Digests) -> None:
    """The size of buckets changes no bit. Another dtype does."""
    assert digests["fp32"] == digests["small buckets"] == digests["bucket views"]
    assert digests["bf16"] == digests["small bf16 bucket views"] != digests["fp32"]


@pytest.mark.parametrize(
    "variant",
    [
        "sharded whole",
        "sharded, kept after forward",
        "sharded, freed after forward",
        "sharded, sync last",
        "sharded, sync last, after another",
    ],
)
def test_the_way_of_sharding_changes_no_bit(digests: Digests, variant: str) -> None:
    """Which modules are sharded changes no bit, nor if they are freed, nor when they exchange."""
    assert bits(digests[variant]) == bits(digests["sharded fp32"])


def test_siblings_that_fsdp_adds_have_the_bits_of_the_tree(digests: Digests) -> None:
    """Where FSDP would not round a gradient before it adds it, the tree adds all by itself."""
    each, last, wide = (
        bits(digests[f"sharded, summed in bf16{how}"])
        for how in ("", ", sync last", ", wide pairs")
    )
    assert each == last != wide


@pytest.mark.parametrize("variant", list(ranks.ALONE))
def test_sharded_training_has_the_bits_of_one_process(digests: Digests, variant: str) -> None:
    """The bits are those of torch in one process, where the tree is written out."""
    assert bits(digests[variant.replace("alone", "sharded")]) == bits(digests[variant])


def test_both_reductions_have_the_same_bits(digests: Digests) -> None:
    """A sharded model gets the bits of a whole model with the canonical all-reduce."""
    for kind in ("fp32", "bf16", "mixed"):
        assert bits(digests[f"sharded {kind}"]) == bits(digests[kind])


def test_a_rank_keeps_only_shards(digests: Digests) -> None:
    """With m micro-batches, a rank keeps log2(m) sharded gradients between backward passes.

    Of three ranks each keeps shards of neighbours that have no common parent yet.
    """
    found = digests["sharded, measured"]
    assert found == {"1": ["3.0"], "2": ["2.0"] * 2, "3": ["3.0"] * 3, "4": ["1.0"] * 4}


def test_a_rank_that_syncs_last_keeps_whole_gradients(digests: Digests) -> None:
    """With m micro-batches, log2(m) of them at most, each as large as one shard of every rank."""
    found = digests["sharded, sync last, measured"]
    assert found == {"1": ["3.0"], "2": ["3.8"] * 2, "4": ["3.4"] * 4}  # some unpadded


@pytest.mark.parametrize("variant", [*ranks.PLANTED, *ranks.PLANTED_SHARDED, *ranks.PLANTED_UNEVEN])
def test_a_planted_bug_changes_bits(digests: Digests, variant: str) -> None:
    """Each planted bug makes the weights depend on the world size."""
    assert len(bits(digests[variant])) > 1


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_the_same_bits_on_gpus() -> None:
    """The bits are the same on any number of GPUs, over NCCL and through peer memory."""
    digests = trained("cuda", [*ranks.RIGHT, *ranks.ON_GPUS, *ranks.RIGHT_SHARDED])
    for variant, found in digests.items():
        assert len(found) > 1
        assert len(bits(found)) == 1, variant
    for dtype in ("fp32", "bf16"):
        by_kernels, by_copies = (digests[f"symmetric {dtype}{how}"] for how in ("", ", by copies"))
        assert by_kernels == by_copies == digests[dtype]
