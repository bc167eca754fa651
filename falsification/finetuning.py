"""Bugs of fine-tuning: in what is learned, in adapters, and in what is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor, nn

from entrenar_py.shared.faults import Fault
from entrenar_py.shared.mutants import Variant
from entrenar_py.shared.scenario import Scenario, TrainingPlan
from entrenar_py.train.arithmetic import optimizer, reduction, sharding
from entrenar_py.train.arithmetic.tensors import Array, Batch
from entrenar_py.train.coordinator import replicas
from entrenar_py.train.coordinator.server import Server
from entrenar_py.train.model import (
    chat_template,
    model,
    objectives,
    precision,
    preference,
    samples,
    stock,
    workload,
)
from entrenar_py.train.model.conversations import Conversation
from entrenar_py.train.model.rendering import Range, TokenRanges
from entrenar_py.train.model.samples import Samples
from entrenar_py.train.model.settings import Settings

from .subjects import REPLICAS, SERVER, TRAINING

TUNING = "entrenar_py.train.model"
WORKLOAD = f"{TUNING}.workload.Finetuning"
ROWS = f"{TUNING}.workload.Rows.batch"
PREFERENCE = f"{TUNING}.preference.PreferenceObjective"
STRATEGIES = "entrenar_py.train.finetune.strategies"
ADAPTERS = f"{TUNING}.stock.adapted"
FIRST = "model.layers.0.self_attn.q_proj"  # the first layer with an adapter
FIRST_A = f"base_model.model.{FIRST}.lora_A.default.weight"
FIRST_B = f"base_model.model.{FIRST}.lora_B.default.weight"

_loss, _batch, _adapted = workload.Finetuning.loss, workload.Rows.batch, stock.adapted
_load, _merge, _restore = model.load, stock.merge, Server.restore
_compute, _clip, _step = replicas.Replicas.compute, optimizer.clip, optimizer.step
_class_weights, _loading = samples.class_weights, precision.quantised_loading
_targets = TokenRanges.targets
_log_probabilities, _margins = preference.PreferenceObjective.log_probabilities, preference.margins


def finetuned(*facts: str, **changes: Any) -> Scenario:
    """Return a run of two workers: 12 chats in batches of 6, adapters of rank 2 on two layers."""
    asked = {"task": "instruct", **changes.pop("options", {})}
    usual: dict[str, Any] = {
        "system": "finetuned",
        "workload": "finetune",
        "world_size": 2,
        "seed": 0,
        "num_shards": 4,
        "num_samples": 12,
        "batch_size": 6,
        "num_steps": 2,
        "optimizer": "adamw",
        "learning_rate": 0.01,
        "detail": "values",
        "options": {**asked, "facts": [*facts]} if facts else asked,
    }
    return Scenario(**{**usual, **changes})


# --- adapters -------------------------------------------------------------------------------------


def layers_with_adapters(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the name and the module of each layer with an adapter."""
    for name, layer in module.named_modules():
        if hasattr(layer, "lora_A") and hasattr(layer, "base_layer"):
            yield name, layer


def merge_then_resume(self: Server) -> int:
    """Adds the adapters to the weights before a run goes on, and leaves them in."""
    step = _restore(self)
    held = self.replica.replica.arrays
    for name, layer in layers_with_adapters(self.replicas.workload.module):  # type: ignore[attr-defined]
        a, b = (held[f"{name}.lora_{half}.default.weight"] for half in "AB")
        with torch.no_grad():
            layer.base_layer.weight += layer.scaling["default"] * torch.from_numpy(b @ a)
    return step


def twice_the_rank(settings: Settings, module: Any, new: Sequence[str]) -> nn.Module:
    """Makes adapters of twice the rank, at the same scale."""
    lora = settings.lora
    wide = replace(lora, rank=2 * lora.rank, alpha=2 * lora.alpha)
    return _adapted(replace(settings, lora=wide), module, new)


def drawn_b(settings: Settings, module: Any, new: Sequence[str]) -> nn.Module:
    """Draws B as well as A."""
    adapted = _adapted(settings, module, new)
    for name, parameter in adapted.named_parameters():
        if ".lora_B." in name:
            nn.init.normal_(parameter.data, std=0.02)
    return adapted


def scaled_twice(settings: Settings, module: Any, new: Sequence[str]) -> nn.Module:
    """Multiplies an adapter's output by alpha / rank twice."""
    adapted = _adapted(settings, module, new)
    for _, layer in layers_with_adapters(adapted):
        layer.scaling["default"] **= 2
    return adapted


def merge_scaled_twice(module: nn.Module, tokenizer: Any, folder: Path) -> None:
    """Multiplies the adapters by alpha / rank once more as they are merged."""
    for _, layer in layers_with_adapters(module):
        layer.scaling["default"] **= 2
    _merge(module, tokenizer, folder)


def merge_in_half(module: nn.Module, tokenizer: Any, folder: Path) -> None:
    """Merges in 16 bits."""
    _merge(module.half(), tokenizer, folder)


def write_the_first(
    module: nn.Module, tensors: Mapping[str, Array], tokenizer: Any, folder: Path
) -> None:
    """Writes the module's own weights, which the training has not changed."""
    module.save_pretrained(folder)  # type: ignore[operator]
    tokenizer.save_pretrained(folder)


def all_layers(empty: nn.Module) -> Iterator[str]:
    """Takes the head for a layer within a block."""
    yield from (name for name, _ in empty.named_modules())


def in_fp4(empty: nn.Module, products: torch.dtype) -> dict[str, Any]:
    """Quantises to 4-bit floats, whose levels are not those of normally distributed weights."""
    found = _loading(empty, products)
    found["quantization_config"].bnb_4bit_quant_type = "fp4"
    return found


# --- what is learned ------------------------------------------------------------------------------


def unshifted(self: workload.Finetuning, ids: Sequence[int]) -> tuple[Tensor, ...]:
    """Takes the logits at a place for those of the token there."""
    tokens, _, targets = self._rows.batch(ids)
    places = (targets.flatten() != objectives.IGNORED).nonzero().flatten()
    return tokens, places, targets.flatten()[places]


def padding_counted(self: workload.Rows, ids: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Leaves out no padding."""
    tokens, mask, targets = _batch(self, ids)
    return tokens, mask, torch.where(mask == 0, tokens, targets)


def prompt_counted(self: workload.Rows, ids: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Takes all tokens of a row as labels, -100 only where there is none."""
    tokens, mask, _ = _batch(self, ids)
    return tokens, mask, torch.where(mask == 0, objectives.IGNORED, tokens)


def rendered_then_tokenised(
    self: TokenRanges, text: str, parts: Sequence[Range]
) -> tuple[list[int], list[bool]] | None:
    """Renders the chat as a text and tokenises that, which adds the first token again."""
    found = _targets(self, text, parts)
    return found and ([self._tokenizer.bos_token_id, *found[0]], [False, *found[1]])


def mask_of_offsets(
    self: chat_template.ChatEncoder, conversation: Conversation
) -> tuple[list[int], list[bool]]:
    """Takes the mask that transformers makes of a template's marks and of a tokenizer's offsets."""
    tokenizer = self._ranges._tokenizer
    found = tokenizer.apply_chat_template(
        list(conversation.messages), return_dict=True, return_assistant_tokens_mask=True
    )
    return list(found["input_ids"]), [flag == 1 for flag in found["assistant_masks"]]


def padding_unknown(settings: Settings, pad_token: int) -> nn.Module:
    """Leaves the model without the padding token: it reads the class from the last column."""
    module = _load(settings, pad_token)
    module.config.pad_token_id = -1  # type: ignore[union-attr]
    return module


def without_root(found: Samples, kind: str, labels: Sequence[str]) -> tuple[float, ...]:
    """Takes the root for the whole."""
    return _class_weights(found, "inverse" if kind == "sqrt_inverse" else kind, labels)


def drawn_again(num_samples: int, rng: np.random.Generator) -> sharding.Ids:
    """Draws each sample of an epoch anew, as a weighted sampler with replacement does."""
    return tuple(rng.integers(num_samples, size=num_samples).tolist())


def mean_of_micro_batch(
    self: workload.Finetuning, objective: Any, batch: Batch, device: torch.device
) -> Tensor:
    """Averages over the tokens of the shard alone."""
    return _loss(self, objective, batch, device) / (batch[2] != objectives.IGNORED).sum()


def one(self: workload.Finetuning, ids: Sequence[int]) -> float:
    """Counts each shard once."""
    return 1.0


def mean_of_sample(self: Any, tokens: Tensor, places: Tensor, targets: Tensor) -> Tensor:
    """Averages over the tokens of each sample, then over samples."""
    losses = F.cross_entropy(
        self.logits_of(tokens, None).index_select(0, places),
        targets,
        ignore_index=objectives.IGNORED,
        reduction="none",
    )
    rows = F.one_hot(places // tokens.shape[1], tokens.shape[0]).to(losses)
    rows = rows * (targets != objectives.IGNORED).unsqueeze(1)
    return ((losses @ rows) / rows.sum(0)).sum()


def number_of_samples(self: workload.Finetuning, ids: Sequence[int]) -> float:
    """Counts samples."""
    return float(len(ids))


# --- pairs ----------------------------------------------------------------------------------------

PAIRS: dict[str, Any] = {"task": "preference"}


def reference_adapted(self: Any, *batch: Tensor) -> Tensor:
    """Lets the reference compute with the adapters, as they are by then."""
    with torch.no_grad():
        found: Tensor = self.log_probabilities(*batch)
    return found


def mean_log_probability(self: Any, tokens: Tensor, places: Tensor, targets: Tensor) -> Tensor:
    """Divides a log-probability by the number of tokens."""
    return _log_probabilities(self, tokens, places, targets) / (targets != objectives.IGNORED).sum(
        1
    )


def sides_exchanged(policy: Tensor, reference: Tensor, beta: float) -> Tensor:
    """Prefers the rejected side."""
    return -_margins(policy, reference, beta)


# --- steps ----------------------------------------------------------------------------------------


def share_of_the_first(self: Any, rank: int, world_size: int) -> range:
    """Gives each rank the shards of the first."""
    return range(len(sharding.cut(range(self.plan.num_shards), world_size)[0]))


class _MasksByRank:
    """A plan that draws dropout's masks by the rank that computes."""

    def __init__(self, plan: TrainingPlan, rank: int) -> None:
        self._plan, self._rank = plan, rank

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)

    def rng(self, *stream: str | int) -> np.random.Generator:
        """Return a stream; that of dropout depends on the rank."""
        by_rank = (self._rank,) if stream[0] == "dropout" else ()
        return self._plan.rng(*stream, *by_rank)


def masks_by_rank(
    self: replicas.Replicas, worker: replicas.Worker, step: int, shard: int, ids: sharding.Ids
) -> reduction.Node:
    """Draws the masks of a shard by the rank that happens to compute it."""
    plan = self.plan
    self.plan = _MasksByRank(plan, worker.rank)  # type: ignore[assignment]
    try:
        return _compute(self, worker, step, shard, ids)
    finally:
        self.plan = plan


def forget_moments(self: Server) -> int:
    """Resumes with moments of zero, as from a file of adapters alone."""
    step = _restore(self)
    for moments in self.replica.state.values():
        moments[:] = 0.0
    return step


def clip_halves(gradient: Array, norm: float, clip_norm: float | None) -> Array:
    """Clips each half of the adapters by its own norm."""
    halves = np.array_split(gradient, 2)
    return np.concatenate([_clip(one, optimizer.norm_l2(one), clip_norm) for one in halves])


def no_decay(
    rule: optimizer.Rule,
    weights: optimizer.Vector,
    gradient: optimizer.Vector,
    state: optimizer.State,
    rate: float,
) -> None:
    """Leaves weight decay out."""
    _step(replace(rule, weight_decay=0.0), weights, gradient, state, rate)


VARIANTS = (
    Variant(
        name="ft-merged-before-resume",
        summary="adapters are added to the weights before a resume, and stay",
        source="torchtune #1188 (merged weights next to the adapters of a resume)",
        plants={f"{SERVER}.Server.restore": merge_then_resume},
        scenario=finetuned(num_steps=3, stops=(1, 2)),
        invariants=("F-FT-001",),
        place={"tensor": f"{FIRST}.weight"},
    ),
    Variant(
        name="ft-rank-doubled",
        summary="adapters have twice the configured rank",
        source="classic",
        plants={ADAPTERS: twice_the_rank},
        scenario=finetuned("merged"),
        invariants=("F-FT-002",),
        place={"tensor": FIRST},
    ),
    Variant(
        name="ft-b-at-random",
        summary="both halves of an adapter are drawn: it changes the model before the first step",
        source="classic",
        plants={ADAPTERS: drawn_b},
        scenario=finetuned("merged"),
        invariants=("F-FT-003",),
        place={"step": -1, "tensor": FIRST},
    ),
    Variant(
        name="ft-stale-export",
        summary="the written weights are those from before training",
        source="classic",
        plants={f"{TUNING}.stock.save": write_the_first},
        scenario=finetuned("outputs"),
        invariants=("F-FT-004",),
        place={"step": 1, "tensor": FIRST_A},
    ),
    Variant(
        name="ft-alpha-twice",
        summary="a merge multiplies by alpha / rank twice",
        source="classic",
        plants={f"{TUNING}.stock.merge": merge_scaled_twice},
        scenario=finetuned("merged"),
        invariants=("F-FT-005",),
        place={"tensor": FIRST},
    ),
    Variant(
        name="ft-merged-in-half",
        summary="a merge rounds the model to 16 bits",
        source="peft #1388",
        plants={f"{TUNING}.stock.merge": merge_in_half},
        scenario=finetuned("merged"),
        invariants=("F-FT-005", "F-FT-002"),
        place={"tensor": FIRST},
    ),
    Variant(
        name="ft-labels-unshifted",
        summary="the logits at a position are compared with the token at the same position",
        source="classic",
        plants={f"{WORKLOAD}.batch": unshifted},
        scenario=finetuned("samples"),
        invariants=("F-FT-006",),
        place={"sample_ids": (0,)},
    ),
    Variant(
        name="ft-padding-counted",
        summary="padding is predicted, too",
        source="classic",
        plants={ROWS: padding_counted},
        scenario=finetuned("samples"),
        invariants=("F-FT-006",),
        place={"sample_ids": (0,)},
    ),
    Variant(
        name="ft-prompt-counted",
        summary="the prompt's labels are not set to -100",
        source="trl #445",
        plants={ROWS: prompt_counted},
        scenario=finetuned("samples"),
        invariants=("F-FT-006",),
        place={"sample_ids": (0,)},
    ),
    Variant(
        name="ft-bos-twice",
        summary="a chat is rendered with a BOS token, and the tokenizer adds another one",
        source="OpenRLHF #393; DeepSeek-R1 #151",
        plants={f"{TUNING}.rendering.TokenRanges.targets": rendered_then_tokenised},
        scenario=finetuned("samples"),
        invariants=("F-FT-006",),
        place={"sample_ids": (0,)},
    ),
    Variant(
        name="ft-mask-of-offsets",
        summary="marked turns are masked as in transformers, with offsets that skip white space",
        source="transformers #47325, #33237",
        plants={f"{TUNING}.chat_template.ChatEncoder.encode": mask_of_offsets},
        scenario=finetuned("samples", options={"task": "instruct", "marks": True}),
        invariants=("F-FT-006",),
        place={"sample_ids": (8,)},
    ),
    Variant(
        name="ft-pooled-at-padding",
        summary="a classifier reads the class from the padding, as it has no pad_token_id",
        source="classic (a classifier without pad_token_id)",
        plants={f"{TUNING}.model.load": padding_unknown},
        scenario=finetuned("samples", options={"task": "classify"}),
        invariants=("F-FT-006",),
        place={"sample_ids": (0,)},
    ),
    Variant(
        name="ft-root-forgotten",
        summary="class weights `sqrt_inverse` are computed as `inverse`",
        source="classic",
        plants={f"{TUNING}.samples.class_weights": without_root},
        scenario=finetuned(
            "samples", options={"task": "classify", "class_weights": "sqrt_inverse"}
        ),
        invariants=("F-FT-007",),
        place={"step": 0, "rank": 1},
    ),
    Variant(
        name="ft-drawn-again",
        summary="samples are drawn with replacement",
        source="classic (WeightedRandomSampler)",
        plants={f"{TRAINING}.sharding.order": drawn_again},
        scenario=finetuned("samples", options={"task": "classify", "oversample": True}),
        invariants=("F-FT-008",),
        place={"step": 0},
    ),
    Variant(
        name="ft-micro-batch-mean",
        summary="the loss is the mean over micro-batches of their means",
        source="mlx-lm #1413; transformers #35203 (gradient accumulation)",
        plants={f"{WORKLOAD}.loss": mean_of_micro_batch, f"{WORKLOAD}.weight": one},
        scenario=finetuned("gradients", num_steps=1),
        invariants=("F-FT-009",),
        place={"step": 0, "tensor": "loss"},
    ),
    Variant(
        name="ft-alpha-squared",
        summary="an adapter's output is multiplied by alpha / rank twice",
        source="classic",
        plants={ADAPTERS: scaled_twice},
        scenario=finetuned("gradients", num_steps=1),
        invariants=("F-FT-009",),
        place={"step": 0, "tensor": FIRST_B},
    ),
    Variant(
        name="ft-loss-per-sample",
        summary="a batch's loss is the mean over samples of the means over their tokens",
        source="classic",
        plants={
            f"{TUNING}.objectives.TokenObjective.forward": mean_of_sample,
            f"{WORKLOAD}.weight": number_of_samples,
        },
        scenario=finetuned(),
        invariants=("F-FT-010",),
        place={"step": 0, "rank": 0},
    ),
    Variant(
        name="ft-no-decay",
        summary="weight decay is accepted and ignored",
        source="albor ALB-079 (settings parsed, never used)",
        plants={f"{TRAINING}.optimizer.step": no_decay},
        scenario=finetuned(weight_decay=0.1),
        invariants=("F-FT-010",),
        place={"step": 0, "rank": 0},
    ),
    Variant(
        name="ft-mask-by-rank",
        summary="dropout's masks are drawn by the rank that computes",
        source="classic",
        plants={f"{REPLICAS}.Replicas.compute": masks_by_rank},
        scenario=finetuned(dropout=0.2),
        invariants=("F-FT-011",),
        place={"step": 0},
    ),
    Variant(
        name="ft-moments-forgotten",
        summary="a resumed run has its adapters, but not their moments",
        source="FastChat #1280",
        plants={f"{SERVER}.Server.restore": forget_moments},
        scenario=finetuned(num_steps=3, stops=(2,)),
        invariants=("F-FT-012",),
        place={"step": 2},
    ),
    Variant(
        name="ft-masks-of-the-living",
        summary="a worker that takes over shards draws their masks by its own rank",
        source="classic",
        plants={f"{REPLICAS}.Replicas.compute": masks_by_rank},
        scenario=finetuned(dropout=0.2, faults=(Fault(kind="leave", rank=1, step=1),)),
        invariants=("F-FT-013",),
        place={"step": 1},
    ),
    Variant(
        name="ft-clipped-by-tensor",
        summary="each half of an adapter is clipped by its own norm",
        source="Megatron-LM abf10f8590 (two optimizers, two norms)",
        plants={f"{TRAINING}.optimizer.clip": clip_halves},
        scenario=finetuned(clip_norm=0.05),
        invariants=("F-FT-014",),
        place={"step": 0, "rank": 0},
    ),
    Variant(
        name="ft-head-quantised",
        summary="the head of a language model is quantised, too",
        source="classic",
        plants={f"{TUNING}.precision._within_blocks": all_layers},
        scenario=finetuned(options={"method": "qlora", "family": "llama"}),
        invariants=("F-FT-015",),
        place={"tensor": "lm_head"},
    ),
    Variant(
        name="ft-fp4",
        summary="weights are quantised to FP4, bitsandbytes' default, instead of NF4",
        source="classic (bnb_4bit_quant_type is left out)",
        plants={f"{TUNING}.precision.quantised_loading": in_fp4},
        scenario=finetuned(options={"method": "qlora"}),
        invariants=("F-FT-015",),
        place={"tensor": "model.layers.0.mlp.down_proj"},
    ),
    Variant(
        name="ft-reference-adapted",
        summary="the reference of a preference computes with the adapters, which change",
        source="classic (a reference that is the trained model)",
        plants={f"{PREFERENCE}.reference": reference_adapted},
        scenario=finetuned("samples", num_samples=6, options=PAIRS),
        invariants=("F-FT-017",),
        place={"sample_ids": (0,)},
    ),
    Variant(
        name="ft-pair-prompt-counted",
        summary="the log-probability of a side includes its prompt",
        source="classic (labels without -100)",
        plants={ROWS: prompt_counted},
        scenario=finetuned("samples", num_samples=6, options=PAIRS),
        invariants=("F-FT-018",),
        place={"sample_ids": (0,)},
    ),
    Variant(
        name="ft-pair-padding-counted",
        summary="the log-probability of the shorter side includes its padding",
        source="classic",
        plants={ROWS: padding_counted},
        scenario=finetuned("samples", num_samples=6, options=PAIRS),
        invariants=("F-FT-018",),
        place={"sample_ids": (0,)},
    ),
    Variant(
        name="ft-mean-log-probability",
        summary="a side's log-probability is the mean over its tokens, not their sum",
        source="classic (average_log_prob)",
        plants={f"{PREFERENCE}.log_probabilities": mean_log_probability},
        scenario=finetuned("samples", "gradients", num_samples=6, options=PAIRS),
        invariants=("F-FT-019",),
        place={"step": 0},
    ),
    Variant(
        name="ft-sides-exchanged",
        summary="the rejected side is preferred",
        source="classic",
        plants={f"{TUNING}.preference.margins": sides_exchanged},
        scenario=finetuned("samples", "gradients", num_samples=6, options=PAIRS),
        invariants=("F-FT-019",),
        place={"step": 0},
    ),
    Variant(
        name="ft-same-share",
        summary="each rank trains on the shards of rank 0, as without a distributed sampler",
        source="classic",
        plants={f"{STRATEGIES}.strategy.Shards.share": share_of_the_first},
        scenario=finetuned(options={"strategy": "ddp"}).with_(system="finetuned_by_ranks"),
        invariants=("F-FT-016",),
        place={"step": 1, "tensor": FIRST_A},
    ),
)
