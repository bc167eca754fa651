"""Packed rows: each sample once, unseen by others, with the losses that it has alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.arithmetic import engine
from entrenar_py.train.model import model, packing, prepared
from entrenar_py.train.model.objectives import IGNORED
from entrenar_py.train.model.workload import Finetuning
from tests.train.model import checkpoints

# peft asks for what a later transformers will lack.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
IDS = list(range(8))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_every_sample_is_in_one_row_and_no_row_is_too_long(lengths: list[int]) -> None:
    rows = packing.rows_of(lengths, 32)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    for row in rows:
        assert sum(lengths[index] for index in row) <= 32 or len(row) == 1
        assert row == sorted(row)


def test_a_sample_goes_into_the_first_row_with_room() -> None:
    assert packing.rows_of([20, 20, 10, 5, 30], 32) == [[0, 2], [1, 3], [4]]


def workloads(small: Path, folder: Path, config: Any) -> tuple[Finetuning, Finetuning]:
    """Return the same model and rows, not packed and packed."""
    settings = checkpoints.settings(small, folder, config)
    packed = replace(settings, data=replace(settings.data, packing=True))
    return prepared.prepare(settings).workload(), prepared.prepare(packed).workload()


def gradient(workload: Finetuning) -> tuple[float, list[Any]]:
    tensors = {
        name: torch.from_numpy(array).requires_grad_()
        for name, array in workload.initial(np.random.default_rng(0)).items()
    }
    return workload.gradients(tensors, IDS, drop=engine.no_dropout, scale=1.0)


@pytest.mark.parametrize(
    "kind",
    [
        checkpoints.qwen3,
        checkpoints.llama,
        checkpoints.mistral,
        checkpoints.gemma2,
        checkpoints.gpt2,
    ],
)
def test_losses_are_those_of_rows_that_are_not_packed(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Callable[[], Any]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    plain, packed = workloads(small, tmp_path / "model", kind())
    assert len(packed.batch(IDS)[0]) < len(plain.batch(IDS)[0]) == len(IDS)
    loss, gradients = gradient(plain)
    same, found = gradient(packed)
    assert same == pytest.approx(loss, rel=1e-6)
    assert packed.weight(IDS) == plain.weight(IDS)
    for ours, theirs in zip(found, gradients, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max(), rtol=1e-3)


def test_every_token_and_target_is_in_the_batch_once(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    plain, packed = workloads(small, tmp_path / "model", checkpoints.llama())
    (tokens, mask, targets), (packed_tokens, positions, wanted) = plain.rows(IDS), packed.rows(IDS)
    due, found = (one[one != IGNORED].sort().values for one in (targets, wanted))
    assert torch.equal(due, found)
    assert (positions == 0).sum() >= len(IDS)
    assert packed_tokens.numel() <= tokens.numel()
    assert mask.max() == 1


def test_models_whose_rows_see_each_other_are_refused(small: Path, tmp_path: Path) -> None:
    class Blind(torch.nn.Module):
        """Sees everything before, whatever the positions."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(16, 4)

        def forward(self, input_ids: Any, position_ids: Any, use_cache: bool) -> Any:
            hidden = self.embedding(input_ids).cumsum(1) + position_ids[..., None]
            return type("Output", (), {"logits": hidden})()

    with pytest.raises(UsageError, match="Blind lets the rows of a sequence see each other"):
        packing.require_apart(Blind(), torch.float32, "x")


def test_positions_that_are_not_read_are_refused(small: Path, tmp_path: Path) -> None:
    """OPT makes its own positions of the mask."""
    settings = checkpoints.settings(small, tmp_path, checkpoints.opt())
    packed = replace(settings, data=replace(settings.data, packing=True))
    with pytest.raises(UsageError, match=r"data.packing with model=.*OPTForCausalLM lets the rows"):
        model.load(packed, pad_token=0)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", [checkpoints.qwen3, checkpoints.llama, checkpoints.gpt2])
def test_every_way_to_attend_honours_it(attention: str, kind: Callable[[], Any]) -> None:
    transformers: Any = pytest.importorskip("transformers")
    module = transformers.AutoModelForCausalLM.from_config(kind(), attn_implementation=attention)
    packing.require_apart(module, torch.float32, "x")
