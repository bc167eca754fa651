"""A model's shape is counted from config.json, and a rehearsal counts what real tensors take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)

from entrenar_py.train.arithmetic import engine
from entrenar_py.train.model import masks, model_folder, precision, stock
from entrenar_py.train.model.samples import Samples
from entrenar_py.train.model.settings import Classes, Lora, Settings
from entrenar_py.train.model.workload import Finetuning
from entrenar_py.train.plan import shape
from entrenar_py.train.plan.shape import Cut, Shape
from tests import extras
from tests.train.plan.qwen3 import QWEN3_4B, TINY, settings

# peft asks for what a later transformers will lack.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
extras.require("peft")
transformers = pytest.importorskip("transformers")
ROWS, LENGTH = 4, 32
SMALL = 4096  # bytes: tokens, masks and single numbers
USUAL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
FAMILIES = {
    "qwen3": TINY,
    "llama": {"model_type": "llama", **USUAL},
    "gemma2": {"model_type": "gemma2", "head_dim": 16, "num_key_value_heads": 2, **USUAL},
    "gpt_neox": {"model_type": "gpt_neox", **USUAL},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_key_value_heads": 2, **USUAL},
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 512,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "attn_pdrop": 0,
        "embd_pdrop": 0,
        "resid_pdrop": 0,
    },
}


def test_qwen3_4b_has_its_real_dimensions(tmp_path: Path) -> None:
    """Rank 16 on q and v: 36 * 16 * (2 * 2560 + 4096 + 1024) elements, 23.6 MB of float32."""
    qwen = Shape(settings(tmp_path, QWEN3_4B))
    counts = qwen.counts()
    assert counts.trained == 5_898_240
    assert counts.frozen_bytes == 4 * 4_022_468_096
    assert qwen.num_blocks == 36
    halves = qwen.counts(Cut(tensor=2))
    # Cut: the layers of all blocks; whole: norms, the embedding, and one factor of each adapter.
    assert 2 * halves.frozen_bytes - counts.frozen_bytes == pytest.approx(
        4 * (151936 * 2560 + 36 * (2 * 2560 + 2 * 128) + 2560)
    )
    assert halves.trained == 36 * 16 * (2 * 2560 + (4096 + 1024) // 2)
    assert qwen.counts(Cut(blocks=18)).trained == counts.trained // 2


def real(settings: Settings, *, recompute: bool) -> shape.Rehearsal:
    """Return what a step on the CPU's real tensors keeps and takes at most."""
    kind, options = model_folder.class_of(settings)
    config = model_folder.configuration(settings)
    for name, value in options.items():
        setattr(config, name, value)
    module: Any = kind.from_config(config, dtype=precision.of_checkpoint(settings))
    module = stock.adapted(settings, module, ()) if settings.adapts else module
    precision.prepare(module, settings)
    module.train().config.pad_token_id = 0
    if recompute:
        masks.recompute(module)
    lengths = np.array([LENGTH, LENGTH, LENGTH - 2, LENGTH])  # filled up, so that there is a mask
    samples = Samples(
        tokens=np.ones(lengths.sum(), np.int32),
        is_target=np.ones(lengths.sum(), np.bool_),
        starts=np.concatenate([[0], np.cumsum(lengths)]),
        labels=np.zeros(ROWS, np.int32),
    )
    weights = (1.0,) * len(settings.classes.labels)
    work = Finetuning(
        module,
        samples,
        pad_token=0,
        class_weights=weights,
        products=precision.of_products(settings),
    )
    tensors = {name: one for name, one in module.named_parameters() if one.requires_grad}
    storages = shape._Storages()
    for one in (*module.parameters(), *module.buffers()):
        storages.add(one)
    before = storages.peak = storages.now
    with storages:
        batch = [one.clone() for one in work.batch(range(ROWS))]
        loss = work.loss_of(tensors, batch, linear=F.linear, drop=engine.no_dropout)
        kept = storages.now - before
        torch.autograd.grad(loss, [*tensors.values()])
    return shape.Rehearsal(kept=kept, peak=storages.peak - before)


@pytest.mark.parametrize(
    ("family", "recompute"), [*((one, False) for one in FAMILIES), ("qwen3", True)]
)
def test_a_rehearsal_counts_what_real_tensors_take(
    tmp_path: Path, family: str, *, recompute: bool
) -> None:
    """Within 2 % for a mixture of experts, whose rows are shared out by their values."""
    found = settings(tmp_path, FAMILIES[family], method="full")
    foreseen = Shape(found).rehearsed(rows=ROWS, length=LENGTH, kind="cpu", recompute=recompute)
    measured = real(found, recompute=recompute)
    slack = 0.02 if family == "mixtral" else 0.0
    assert foreseen.kept == pytest.approx(measured.kept, rel=slack, abs=SMALL)
    assert foreseen.peak == pytest.approx(measured.peak, rel=slack, abs=SMALL)


@pytest.mark.parametrize("task", ["instruct", "classify"])
def test_adapters_keep_what_real_tensors_keep(tmp_path: Path, task: str) -> None:
    labels = ("a", "b") if task == "classify" else ()
    found = settings(tmp_path, TINY, task=task, classes=Classes(labels=labels))
    foreseen = Shape(found).rehearsed(rows=ROWS, length=LENGTH, kind="cpu", recompute=False)
    measured = real(found, recompute=False)
    assert foreseen.kept == pytest.approx(measured.kept, abs=SMALL)
    assert foreseen.peak == pytest.approx(measured.peak, abs=SMALL)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_adapters_of_experts_keep_what_real_tensors_keep(tmp_path: Path, precision: str) -> None:
    """peft adds them to tensors that are no layers. Within 2 %, as for all experts."""
    found = settings(tmp_path, FAMILIES["mixtral"], precision=precision, lora=Lora(rank=2))
    foreseen = Shape(found).rehearsed(rows=ROWS, length=LENGTH, kind="cpu", recompute=False)
    measured = real(found, recompute=False)
    assert foreseen.kept == pytest.approx(measured.kept, rel=0.02)
    assert foreseen.peak == pytest.approx(measured.peak, rel=0.02)


def test_blocks_computed_again_keep_less(tmp_path: Path) -> None:
    qwen = Shape(settings(tmp_path, TINY))
    usual: dict[str, Any] = {"rows": ROWS, "length": 128, "kind": "cuda"}
    plain, again = (qwen.rehearsed(**usual, recompute=one) for one in (False, True))
    assert again.kept < plain.kept / 2
    assert again.peak < plain.peak


def test_a_device_without_fused_attention_keeps_all_scores(tmp_path: Path) -> None:
    qwen = Shape(settings(tmp_path, TINY))
    usual: dict[str, Any] = {"rows": ROWS, "length": 256, "recompute": False}
    fused, plain = (qwen.rehearsed(**usual, kind=kind) for kind in ("cpu", "wgpu"))
    scores = 4 * ROWS * 4 * 256**2 * TINY["num_hidden_layers"]
    assert plain.kept - fused.kept > scores / 2


def test_bfloat16_products_keep_less(tmp_path: Path) -> None:
    """Formats follow autocast's rules: meta tensors have no autocast of their own."""
    kept, peaks = list[int](), list[int]()
    for name in ("float32", "bfloat16"):
        found = settings(tmp_path, TINY, precision=name)
        step = Shape(found).rehearsed(rows=ROWS, length=LENGTH, kind="cpu", recompute=False)
        measured = real(found, recompute=False)
        assert step.kept == pytest.approx(measured.kept, rel=0.01)
        kept.append(step.kept)
        peaks.append(Shape(found).counts().frozen_bytes)
    assert kept[1] < 0.7 * kept[0]
    assert 2 * peaks[1] == peaks[0]


def test_nf4_weights_take_half_a_byte_and_their_scales(tmp_path: Path) -> None:
    plain, packed = (
        Shape(settings(tmp_path, TINY, method=method)).counts() for method in ("lora", "qlora")
    )
    # Per block: q, k, v, o, gate, up and down; their rows are whole blocks of 64 weights.
    weights = 4 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128)
    spared = 4 * weights - (weights // 2 + weights // 64)
    assert plain.frozen_bytes - packed.frozen_bytes == pytest.approx(spared, rel=0.002)


def test_capped_logits_are_held_whole(tmp_path: Path) -> None:
    """A loss that never holds all logits takes those of the head as they are."""
    usual: dict[str, Any] = {"rows": 1, "length": 64, "kind": "cpu", "recompute": False}
    config = {**FAMILIES["gemma2"], "vocab_size": 2**17}
    peaks = [
        Shape(settings(tmp_path, {**config, "final_logit_softcapping": cap}, method="lora"))
        .rehearsed(**usual)
        .peak
        for cap in (None, 30.0)
    ]
    assert peaks[1] - peaks[0] > 4 * 64 * 2**17


@pytest.mark.parametrize(
    ("config", "size", "told"),
    [
        (TINY, 2, ""),
        (TINY, 4, "num_key_value_heads=2 is no multiple of 4 ranks"),
        (FAMILIES["gpt2"], 2, "GPT2Model has no plan for cutting its layers (base_model_tp_plan)"),
    ],
)
def test_layers_are_cut_by_the_plan_of_transformers(
    tmp_path: Path, config: dict[str, Any], size: int, told: str
) -> None:
    targets = replace(settings(tmp_path, config), method="full")
    assert Shape(targets).cuts_into(size) == told
