"""Ranks with compiled blocks: the same bits for any number of ranks, and the losses of one process.

Here torch compiles for the CPU, which the product doesn't: a worker's or rank's blocks are compiled
on CUDA alone. What decides bits (examples, order, sums) is the same code.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from entrenar_py.train.model.settings import COMPILABLE
from entrenar_py.train.service import exit_codes
from tests.train.finetune.strategies import ranks, runs
from tests.train.finetune.strategies.runs import Case

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch needs a C++ compiler"),
]
TOLERANCE = 2e-5  # as in test_strategies


@pytest.fixture
def case(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    """The small Qwen3, compiled; torch keeps its kernels, also for the next run of the tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Case(folder=tmp_path, model=small / "model", small=small, more={"compile": True})


def trained(
    case: Case,
    name: str,
    strategy: str,
    world_size: int,
    *options: str,
    copies_before: int | None = None,
) -> Path:
    """Train the case; return its output, once it says whether it compiled."""
    config = case.write(name, strategy)
    codes, told = ranks.torchrun(
        config, world_size, *options, compiles=True, copies_before=copies_before
    )
    assert codes == [exit_codes.DONE] * world_size, told
    (began,) = runs.noted(case.folder / name, "began")[-1:]
    assert ("blocks compiled" in began["text"]) == bool(case.more["compile"])
    return case.folder / name


def as_alone(case: Case, strategy: str, world_size: int, **more: int) -> Path:
    """Train with the losses of one process. Return the output."""
    output = trained(case, "out", strategy, world_size, **more)
    steps, _ = case.alone()
    losses = [one.loss for one in runs.steps(output)]
    assert losses == pytest.approx([one.loss for one in steps], rel=TOLERANCE)
    return output


def uninterrupted(case: Case, strategy: str, world_size: int) -> Path:
    """Train as one process does; `--resume` goes on with the same bits. Return the output.

    What is resumed is a copy of the output folder from before step 3, saved after step 1.
    """
    case = replace(case, more={**case.more, "checkpoint_every": 2})
    output = as_alone(case, strategy, world_size, copies_before=3)
    resumed = trained(case, "broken", strategy, world_size, "--resume")
    assert [one.step for one in runs.steps(resumed)] == [0, 1, 2, 2, 3]
    assert runs.digest(output) == runs.digest(resumed)
    return output


def test_canonical_ranks_write_the_same_bits(case: Case) -> None:
    """Some shards are one row and some two, each kind with kernels of its own."""
    one = trained(case, "one", "ddp_canonical", 1)
    assert runs.digest(one) == runs.digest(uninterrupted(case, "ddp_canonical", 2))


def test_nothing_is_compiled_without_the_key(case: Case) -> None:
    case = replace(case, more={"compile": False})
    outputs = [trained(case, f"out{size}", "ddp_canonical", size) for size in (1, 2)]
    assert runs.digest(outputs[0]) == runs.digest(outputs[1])


def test_uneven_ranks_train_as_one_process_does(case: Case) -> None:
    """They find the kernels of the first test, which has resumed with them."""
    as_alone(case, "ddp", 3)


def test_ranks_with_a_part_of_each_block_train_as_one_process_does(case: Case) -> None:
    """Their kernels are different ones; here all shards are two rows, so there is one kind."""
    uninterrupted(replace(case, num_rows=16), "tensor_parallel", 2)


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.multi_gpu
@two_gpus
@pytest.mark.parametrize("compiles", [True, False])
def test_gpus_write_the_same_bits(case: Case, compiles: bool) -> None:
    """Each shard is recorded at its second shape, and replayed."""
    case = replace(case, more={"compile": compiles, "precision": "bfloat16"})
    for size in (1, 2):
        codes, told = ranks.torchrun(case.write(f"out{size}", "ddp_canonical"), size, on_gpus=True)
        assert codes == [exit_codes.DONE] * size, told
        assert "can't be recorded" not in told
    assert runs.digest(case.folder / "out1") == runs.digest(case.folder / "out2")


@pytest.mark.multi_gpu
@two_gpus
@pytest.mark.parametrize("strategy", COMPILABLE)
def test_compiled_gpus_train_as_one_process_does(case: Case, strategy: str) -> None:
    codes, told = ranks.torchrun(case.write("out", strategy), 2, on_gpus=True)
    assert codes == [exit_codes.DONE] * 2, told
    assert "can't be recorded" not in told
    steps, _ = case.alone()
    losses = [one.loss for one in steps]
    found = [one.loss for one in runs.steps(case.folder / "out")]
    assert found == pytest.approx(losses, rel=10 * TOLERANCE)  # a GPU has other kernels
