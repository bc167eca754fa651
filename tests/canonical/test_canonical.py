"""Weights have the same bits on 1, 2 and 4 ranks, and no bug of the reduction keeps them so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.canonical import ranks

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def digests() -> dict[str, dict[str, list[str]]]:
    """{variant: {world size: [of each rank]}}, of real ranks over gloo."""
    source = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    found = subprocess.run(
        [sys.executable, "-m", "tests.canonical.ranks"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr
    return dict(json.loads(found.stdout))


@pytest.mark.parametrize("variant", list(ranks.RIGHT))
def test_the_same_bits_on_any_world_size(
    digests: dict[str, dict[str, list[str]]], variant: str
) -> None:
    """Whatever the dtype, the buckets and the layout of weights."""
    found = digests[variant]
    assert {size: len(of_ranks) for size, of_ranks in found.items()} == {"1": 1, "2": 2, "4": 4}
    assert len({digest for of_ranks in found.values() for digest in of_ranks}) == 1


def test_buckets_change_no_bit(digests: dict[str, dict[str, list[str]]]) -> None:
    """How a model is cut into buckets is nobody's business; another dtype is another training."""
    assert digests["fp32"] == digests["small buckets"] == digests["bucket views"]
    assert digests["bf16"] == digests["small bf16 bucket views"] != digests["fp32"]


@pytest.mark.parametrize("variant", list(ranks.PLANTED))
def test_a_planted_bug_changes_bits(digests: dict[str, dict[str, list[str]]], variant: str) -> None:
    """Each makes the weights depend on the world size."""
    assert len({digest for of_ranks in digests[variant].values() for digest in of_ranks}) > 1
