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
def case(
    small: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Case:
    """The small Qwen3, compiled; kernels are kept for the next test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kept = tmp_path_factory.getbasetemp() / "inductor"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(kept))
    return Case(folder=tmp_path, model=small / "model", small=small, more={"compile": True})


def trained(case: Case, name: str, strategy: str, world_size: int, *options: str) -> Path:
    config = case.write(name, strategy)
    codes, told = ranks.torchrun(config, world_size, *options, compiles=True)
    assert codes == [exit_codes.DONE] * world_size, told
    (began,) = runs.noted(case.folder / name, "began")[-1:]
    assert ("blocks compiled" in began["text"]) == bool(case.more["compile"])
    return case.folder / name


@pytest.mark.parametrize("compiles", [True, False])
def test_canonical_ranks_write_the_same_bits(case: Case, compiles: bool) -> None:
    case = replace(case, more={"compile": compiles})
    outputs = [trained(case, f"out{size}", "ddp_canonical", size) for size in (1, 2)]
    assert runs.digest(outputs[0]) == runs.digest(outputs[1])


@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [("ddp", 3), ("ddp_canonical", 2), ("tensor_parallel", 2)],
)
def test_compiled_ranks_train_as_one_process_does(
    case: Case, strategy: str, world_size: int
) -> None:
    """And a run that died goes on with the same bits."""
    case = replace(case, more={**case.more, "checkpoint_every": 2})
    output = trained(case, "out", strategy, world_size)
    steps, _ = case.alone()
    found = runs.steps(output)
    assert [one.loss for one in found] == pytest.approx([one.loss for one in steps], rel=TOLERANCE)
    broken = case.write("broken", strategy)
    ranks.torchrun(broken, world_size, dies_before=3, compiles=True)
    resumed = trained(case, "broken", strategy, world_size, "--resume")
    assert runs.digest(output) == runs.digest(resumed)


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
