"""Pairs of a better and a worse answer: the loss, its gradients, and the reference."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from entrenar_py.train.arithmetic import engine
from entrenar_py.train.model import objectives, preference, preparation
from entrenar_py.train.model.objectives import IGNORED
from entrenar_py.train.model.preference import DirectPreference
from entrenar_py.train.model.preparation import Prepared
from entrenar_py.train.model.settings import Data, Lora, Preference, Settings
from tests.train.model import checkpoints
from tests.train.model.test_objectives import ReadsNothing

# peft asks for what a later transformers will lack.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

TEXTS = [
    {"prompt": "list: ", "chosen": "ls -la docs", "rejected": "rm -rf /etc"},
    {"prompt": "copy it ", "chosen": "cp a.txt b.txt", "rejected": "dd if=/dev/zero of=/dev/sda"},
    {"prompt": "show", "chosen": " cat notes", "rejected": " find / -delete"},
    {"prompt": "", "chosen": "tail -n 3 build.log", "rejected": "tail"},
]
CHATS = [
    {
        "prompt": [{"role": "user", "content": "list"}],
        "chosen": [{"role": "assistant", "content": "ls -la docs"}],
        "rejected": [{"role": "assistant", "content": "rm -rf /etc"}],
    },
    {
        "prompt": [
            {"role": "system", "content": "be careful"},
            {"role": "user", "content": "copy"},
            {"role": "assistant", "content": "what?"},
            {"role": "user", "content": "a to b"},
        ],
        "chosen": [{"role": "assistant", "content": "cp a b"}],
        "rejected": [{"role": "assistant", "content": "mv a b, then rm b"}],
    },
    {
        "prompt": [{"role": "user", "content": "show"}],
        "chosen": [
            {"role": "assistant", "content": "which?"},
            {"role": "user", "content": "notes"},
            {"role": "assistant", "content": "cat notes"},
        ],
        "rejected": [{"role": "assistant", "content": "cat /dev/urandom"}],
    },
]
IDS = [2, 0, 1]
LOSS = Preference(beta=0.3, label_smoothing=0.1)


def settings(small: Path, folder: Path, rows: Any, **changes: Any) -> Settings:
    """Return settings for pairs in `rows`, which are written to `folder`."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    usual: dict[str, Any] = {
        "model": small / "model",
        "lora": Lora(rank=2, alpha=4, targets=("q_proj", "v_proj", "down_proj")),
        "preference": LOSS,
        "task": "preference",
        "output": folder / "out",
        "data": Data(train=path, max_tokens=96),
    }
    return Settings(**{**usual, **changes})


def prepared(small: Path, folder: Path, rows: Any, **changes: Any) -> Prepared:
    return preparation.prepare(settings(small, folder, rows, **changes), folder / "cache")


def workload_of(ready: Prepared) -> DirectPreference:
    found = ready.workload()
    assert isinstance(found, DirectPreference)
    return found


def tensors_of(workload: DirectPreference) -> dict[str, Tensor]:
    """Return the trainable tensors, with adapters that add something."""
    torch.manual_seed(1)
    return {
        name: (one.detach() + 0.05 * torch.randn_like(one)).requires_grad_()
        for name, one in workload.module.named_parameters()
        if one.requires_grad
    }


def sums(module: Any, rows: list[tuple[list[int], int]]) -> Tensor:
    """Return the log-probability of each row's tokens from a place on, one row at a time."""
    found = []
    for tokens, begin in rows:
        logits = module(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, :-1]
        logs = logits.double().log_softmax(-1)
        own = logs[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])]
        found.append(own[begin - 1 :].sum())
    return torch.stack(found)


def rows_of(ready: Prepared, ids: list[int]) -> list[tuple[list[int], int]]:
    """Return the rows of pairs, and where their completions begin."""
    samples = ready.train.rows
    parts = [samples.part(2 * i + side) for i in ids for side in range(2)]
    return [
        (samples.tokens[part].tolist(), int(samples.is_target[part].argmax())) for part in parts
    ]


def formula(
    workload: DirectPreference, tensors: Mapping[str, Tensor], ready: Prepared, ids: list[int]
) -> tuple[Tensor, list[Tensor]]:
    """Return the summed loss of pairs and its gradients, by the paper's formula."""
    rows = rows_of(ready, ids)
    module: Any = workload.module
    with torch.no_grad(), module.disable_adapter():
        reference = sums(module, rows)
    for tensor, own in zip(tensors.values(), trainable(module), strict=True):
        own.data = tensor.detach().clone()
        own.grad = None
        own.requires_grad_()
    policy = sums(module, rows)
    chosen, rejected = ((policy - reference)[side::2] for side in range(2))
    margin = LOSS.beta * (chosen - rejected)
    smoothing = LOSS.label_smoothing
    loss = -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)
    gradients = torch.autograd.grad(loss.sum(), list(trainable(module)))
    return loss.sum().detach(), list(gradients)


def trainable(module: Any) -> list[Tensor]:
    return [one for name, one in module.named_parameters() if ".lora_" in name]


@pytest.mark.parametrize(
    "kind", [checkpoints.qwen3, checkpoints.gemma2, checkpoints.gpt2], ids=lambda one: one.__name__
)
def test_losses_and_gradients_are_the_formulas(small: Path, tmp_path: Path, kind: Any) -> None:
    """One row at a time, in float64 after the logits. Those of Gemma 2 are capped, so not fused."""
    folder = checkpoints.settings(small, tmp_path / "model", kind()).model
    targets = ("c_attn",) if kind is checkpoints.gpt2 else ("q_proj", "o_proj")
    ready = prepared(small, tmp_path, TEXTS, model=folder, lora=Lora(rank=2, targets=targets))
    workload = workload_of(ready)
    tensors = tensors_of(workload)
    loss, gradients = workload.gradients(tensors, IDS, drop=engine.no_dropout, scale=1.0)
    due, due_gradients = formula(workload, tensors, ready, IDS)
    assert loss == pytest.approx(float(due), rel=1e-5)
    for one, other in zip(gradients, due_gradients, strict=True):
        assert (torch.from_numpy(one) - other).norm() <= 1e-5 * other.norm() + 1e-9


def test_a_batch_is_the_sum_of_its_pairs(small: Path, tmp_path: Path) -> None:
    workload = workload_of(prepared(small, tmp_path, TEXTS))
    tensors = tensors_of(workload)
    assert workload.weight(IDS) == len(IDS)

    def loss(ids: list[int]) -> float:
        return workload.gradients(tensors, ids, drop=engine.no_dropout, scale=1.0)[0]

    assert loss(IDS) == pytest.approx(sum(loss([i]) for i in IDS), rel=1e-6)


def test_adapters_that_add_nothing_give_log_two(small: Path, tmp_path: Path) -> None:
    """Policy and reference have the same bits then, and every margin is zero."""
    workload = workload_of(prepared(small, tmp_path, TEXTS))
    batch = workload.batch(range(4))
    with torch.no_grad():
        loss = workload.objective(*batch)
    assert float(loss) == pytest.approx(4 * 0.69314718, rel=1e-6)


def test_the_reference_drops_nothing_and_keeps_its_bits(small: Path, tmp_path: Path) -> None:
    """A dropout of the model itself is in the policy alone, and adapters are in neither."""
    config = checkpoints.gpt2()
    config.resid_pdrop = 0.5
    folder = checkpoints.settings(small, tmp_path / "model", config).model
    lora = Lora(rank=2, targets=("c_attn",), dropout=0.5)
    workload = workload_of(prepared(small, tmp_path, TEXTS, model=folder, lora=lora))
    objective: Any = workload.objective
    computed, compute = list[Tensor](), objective.log_probabilities

    def watched(*batch: Tensor) -> Tensor:
        computed.append(compute(*batch))
        return computed[-1]

    objective.log_probabilities = watched
    for step in range(2):
        tensors = {name: one * (step + 1) for name, one in tensors_of(workload).items()}
        drop = engine.Dropout(0.5, preparation.seeds(0).rng("dropout", step))
        workload.loss_of(tensors, workload.batch(IDS), linear=F.linear, drop=drop)
    first, trained, second, later = computed
    assert torch.equal(first, second)
    assert not first.requires_grad
    assert not torch.equal(trained, later)
    assert not any(getattr(one, "_disable_adapters", False) for one in workload.module.modules())


def test_each_row_has_places_of_its_own(small: Path, tmp_path: Path) -> None:
    workload = workload_of(prepared(small, tmp_path, TEXTS))
    tokens, places, targets = workload.batch(IDS)
    assert places.shape == targets.shape == (6, objectives.PLACES)
    assert torch.equal(places // tokens.shape[1], torch.arange(6)[:, None].expand_as(places))
    assert (places.flatten().diff() >= 0).all(), "as `select` needs"
    counts = targets != IGNORED
    assert torch.equal(tokens.flatten()[(places + 1)[counts]], targets[counts])
    assert [objective.item() for objective in counts.sum(1)] == [
        int(workload._samples.rows.num_targets[2 * i + side]) for i in IDS for side in range(2)
    ]


def test_a_step_reads_nothing_on_the_host(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it could not be recorded on a GPU. The reference is a part of the recording."""
    transformers = pytest.importorskip("transformers")
    workload = workload_of(prepared(small, tmp_path, TEXTS))
    assert workload.is_static
    tensors, batch = tensors_of(workload), workload.batch(IDS)
    # As while a GPU's operations are recorded.
    monkeypatch.setattr(transformers.utils.import_utils, "is_cuda_stream_capturing", lambda: True)
    with ReadsNothing():  # type: ignore[no-untyped-call]
        loss = workload.loss_of(tensors, batch, linear=F.linear, drop=engine.no_dropout)
        torch.autograd.grad(loss, list(tensors.values()))


@given(st.floats(-200, 200), st.floats(0, 0.49))
def test_a_loss_is_smooth_and_finite(margin: float, smoothing: float) -> None:
    at = torch.tensor([margin], requires_grad=True)
    (loss,) = preference.losses(at, smoothing)
    exact = torch.tensor(margin, dtype=torch.float64)
    due = -(1 - smoothing) * F.logsigmoid(exact) - smoothing * F.logsigmoid(-exact)
    assert loss.item() == pytest.approx(due.item(), rel=1e-5, abs=1e-6)
    (slope,) = torch.autograd.grad(loss, [at])
    assert slope.isfinite().all()


def test_what_is_decided_is_in_the_plan(small: Path, tmp_path: Path) -> None:
    ready = prepared(small, tmp_path, TEXTS)
    options = preparation.plan_of(ready.settings, workload_of(ready)).options
    assert options["preference.beta"] == LOSS.beta
    assert options["preference.label_smoothing"] == LOSS.label_smoothing


@pytest.mark.integrations
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rows", [TEXTS[:3], CHATS], ids=["texts", "chats"])
@pytest.mark.parametrize("adds_first", [False, True], ids=["plain", "first token added"])
def test_as_trl(small: Path, tmp_path: Path, rows: Any, adds_first: bool) -> None:
    """Tokens, losses and gradients are those of TRL's own trainer on the same rows."""
    trl: Any = pytest.importorskip("trl")
    datasets: Any = pytest.importorskip("datasets")
    folder = small / "model"
    if adds_first:
        folder = first_token_added(small, tmp_path / "model")
    ready = prepared(
        small, tmp_path, rows, model=folder, preference=replace(LOSS, label_smoothing=0.0)
    )
    workload = workload_of(ready)
    arguments = trl.DPOConfig(
        output_dir=str(tmp_path / "trl"),
        beta=LOSS.beta,
        max_length=None,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        disable_tqdm=True,
        per_device_train_batch_size=len(rows),
    )
    trainer = trl.DPOTrainer(
        model=workload_of(ready).module,  # another model; TRL's reference is it as it begins
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=ready.tokenizer,
    )
    examples = list(trainer.train_dataset)
    for index, example in enumerate(examples):
        (chosen, begin), (rejected, same) = rows_of(ready, [index])
        begins = len(example["prompt_ids"])
        assert chosen == example["prompt_ids"] + example["chosen_ids"]
        assert rejected == example["prompt_ids"] + example["rejected_ids"]
        assert begin == same == max(begins, 1)
    tensors = tensors_of(workload)
    own = dict(trainer.model.named_parameters())
    for name, tensor in tensors.items():
        own[name].data = tensor.detach().clone()
    loss = trainer.compute_loss(trainer.model, trainer.data_collator(examples))
    theirs = torch.autograd.grad(loss, [own[name] for name in tensors])
    ids = list(range(len(rows)))
    our_loss, ours = workload.gradients(tensors, ids, drop=engine.no_dropout, scale=1.0 / len(rows))
    assert our_loss / len(rows) == pytest.approx(float(loss), rel=1e-5)
    for mine, other in zip(ours, theirs, strict=True):
        assert (torch.from_numpy(mine) - other).norm() <= 1e-5 * other.norm()


def first_token_added(small: Path, folder: Path) -> Path:
    """Return a copy of the small model, with a tokenizer that adds a first token."""
    import shutil

    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    shutil.copytree(small / "model", folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.bos_token = "<|start|>"
    number = tokenizer.convert_tokens_to_ids("<|start|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", number)]
    )
    tokenizer.save_pretrained(folder)
    return folder
