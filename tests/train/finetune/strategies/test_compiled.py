"""Ranks with compiled blocks: the same bits for any number of ranks, and the losses of one process.

Here torch compiles for the CPU, which the product doesn't: a worker's or rank's blocks are compiled
on CUDA alone. What decides bits is the same code: examples, order, sums, and the programs that
torch makes of a block, which must be the same in each rank. They run with torch's own kernels, as
g++ would take minutes for those of a CPU.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from entrenar_py.train.model.settings import COMPILABLE
from entrenar_py.train.service import exit_codes
from tests.train.finetune.strategies import ranks, runs
from tests.train.finetune.strategies.runs import Case

TOLERANCE = 2e-5  # as in test_strategies


@pytest.fixture
def case(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    """The small Qwen3, compiled.

    It has adapters on a layer that is cut by columns and on one that is cut by rows: torch takes
    most of a run's time to trace adapters, and traces them in every rank.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    lora = {"targets": ["q_proj", "down_proj"]}
    more = {"compile": True}
    return Case(folder=tmp_path, model=small / "model", small=small, lora=lora, more=more)


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


def require_programs(case: Case, num_ranks: int, kinds: int) -> None:
    """Require that all ranks of all runs made the same programs, one for each kind of shard.

    They made them for the same sizes, whichever shards came first.
    """
    made = [path.read_text("utf-8") for path in case.folder.glob("*.programs")]
    assert len(made) == num_ranks
    assert len(set(made)) == 1
    assert made[0].count("class GraphModule") == kinds


def require_losses(case: Case, output: Path) -> None:
    """Require the losses of one process, which doesn't compile."""
    steps, _ = case.alone()
    losses = [one.loss for one in runs.steps(output)]
    assert losses == pytest.approx([one.loss for one in steps], rel=TOLERANCE)


def test_canonical_ranks_write_the_same_bits(case: Case) -> None:
    """Some shards are one row and some two, each kind with a program of its own.

    `--resume` goes on with the same bits. What is resumed is a copy of the output folder from
    before step 3, saved after step 1.
    """
    case = replace(case, more={**case.more, "checkpoint_every": 2})
    outputs = [
        trained(case, "one", "ddp_canonical", 1),
        trained(case, "out", "ddp_canonical", 2, copies_before=3),
        trained(case, "broken", "ddp_canonical", 2, "--resume"),
    ]
    assert len(set(map(runs.digest, outputs))) == 1
    assert [one.step for one in runs.steps(outputs[-1])] == [0, 1, 2, 2, 3]
    require_losses(case, outputs[0])
    require_programs(case, 5, kinds=2)


def test_nothing_is_compiled_without_the_key(case: Case) -> None:
    case = replace(case, more={"compile": False})
    outputs = [trained(case, f"out{size}", "ddp_canonical", size) for size in (1, 2)]
    assert runs.digest(outputs[0]) == runs.digest(outputs[1])
    assert not [*case.folder.glob("*.programs")]


def test_uneven_ranks_train_as_one_process_does(case: Case) -> None:
    require_losses(case, trained(case, "out", "ddp", 3))
    require_programs(case, 3, kinds=2)


def test_ranks_with_a_part_of_each_block_train_as_one_process_does(case: Case) -> None:
    """Here all shards are two rows, so there is one kind."""
    case = replace(case, num_rows=16)
    require_losses(case, trained(case, "out", "tensor_parallel", 2))
    require_programs(case, 2, kinds=1)


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
