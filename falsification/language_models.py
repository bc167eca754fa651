"""Bugs of language models' training: of masks, targets, padding, packing, divisors and tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from entrenar_py.shared.mutants import Variant
from entrenar_py.shared.scenario import Scenario
from entrenar_py.systems.probes import language_model
from entrenar_py.systems.probes.language_model import BEGIN, IGNORED, Batch, Decoder

SYSTEM = "entrenar_py.systems.probes.language_model"

_sees, _targets_of = language_model.sees, language_model.targets_of


def trained(*, dropout: float = 0.0, **options: Any) -> Scenario:
    """Return three steps of two ranks with two micro-batches each."""
    return Scenario(
        system="language_model",
        workload="linear",
        world_size=2,
        seed=0,
        accumulation=2,
        num_steps=3,
        dropout=dropout,
        options=options,
    )


# --- what outputs depend on -----------------------------------------------------------------------


def both_sides(mask: Tensor, positions: Tensor) -> Tensor:
    """Lets each token see all of its row."""
    return torch.ones(*mask.shape, mask.shape[1], dtype=torch.bool)


def one_too_many(mask: Tensor, positions: Tensor) -> Tensor:
    """Begins the mask one diagonal too late: each token attends to the next token."""
    return torch.ones(*mask.shape, mask.shape[1], dtype=torch.bool).tril(1)


def mean_over_row(normed: Tensor) -> Tensor:
    """Adds the mean over the row, as a gate that looks at the whole sequence does."""
    return normed + normed.mean(1, keepdim=True)


def padding_seen(mask: Tensor, positions: Tensor) -> Tensor:
    """Drops the padding mask, and keeps the causal one."""
    return torch.ones(*mask.shape, mask.shape[1], dtype=torch.bool).tril()


def documents_seen(mask: Tensor, positions: Tensor) -> Tensor:
    """Begins positions again at each document, and lets documents see each other."""
    return padding_seen(mask, positions)


# --- targets --------------------------------------------------------------------------------------


def not_shifted(given: Batch) -> Tensor:
    """Takes the tokens themselves for targets."""
    return given.ids.masked_fill(given.mask == 0, IGNORED)


def shifted_twice(given: Batch) -> Tensor:
    """Shifts what was shifted."""
    return F.pad(_targets_of(given)[:, 1:], (0, 1), value=IGNORED)


def padding_counted(given: Batch) -> Tensor:
    """Takes the padded tokens for targets, all of them."""
    return F.pad(given.ids[:, 1:], (0, 1), value=IGNORED)


def across(given: Batch) -> Tensor:
    """Has the end of a document predict the first token of the next."""
    after = F.pad(given.ids[:, 1:], (0, 1), value=IGNORED)
    return after.masked_fill(given.mask == 0, IGNORED)


def without_begin(length: int, generator: torch.Generator) -> Tensor:
    """Returns a document that begins with any token."""
    return torch.randint(3, language_model.VOCABULARY, (length,), generator=generator)


def two_begins(length: int, generator: torch.Generator) -> Tensor:
    """Adds the token of a begin to one that the template has added."""
    tokens = without_begin(length, generator)
    tokens[:2] = BEGIN
    return tokens


# --- divisors and tables --------------------------------------------------------------------------


def mean_per_micro_batch(own: int, of_rank: int, of_all: int, scenario: Scenario) -> float:
    """Takes the mean over each micro-batch, and the mean of these."""
    return own * scenario.accumulation


def mean_per_rank(own: int, of_rank: int, of_all: int, scenario: Scenario) -> float:
    """Divides by the rank's own tokens, and takes the mean over ranks."""
    return of_rank


def untied(model: Decoder) -> None:
    """Copies the table where it was to be shared."""
    model.head.weight.data.copy_(model.tokens.weight.data)


# --- modes and masks ------------------------------------------------------------------------------


def left_in_evaluation(model: Decoder, looking: Sequence[Any], given: Batch) -> None:
    """Has no train() after its eval()."""
    model.eval()
    for one in looking:
        language_model.loss_of(model, one, given)


def evaluated_with_masks(model: Decoder, looking: Sequence[Any], given: Batch) -> None:
    """Drops elements in the evaluation, too."""
    for one in looking:
        language_model.loss_of(model, one, given)


def with_other_masks(block: Callable[..., Tensor], *given: Tensor) -> Any:
    """Leaves the generators as they are when the block is computed again."""
    return checkpoint(block, *given, use_reentrant=False, preserve_rng_state=False)


VARIANTS = (
    Variant(
        name="lm-no-causal-mask",
        summary="each token attends to its whole row",
        source="entrenar #310, transformers #48745",
        plants={f"{SYSTEM}.sees": both_sides},
        scenario=trained(),
        invariants=("F-LM-001",),
        place={"step": 0, "rank": 0},
    ),
    Variant(
        name="lm-mask-off-by-one",
        summary="each token attends to the next token",
        source="classic (tril(1) where tril(0) is meant), nsa-release #3",
        plants={f"{SYSTEM}.sees": one_too_many},
        scenario=trained(),
        invariants=("F-LM-001",),
        place={"step": 0, "rank": 0},
    ),
    Variant(
        name="lm-mean-over-row",
        summary="a layer uses the mean over the whole row",
        source="Shwai-He/MEO #2 (a router for each sequence)",
        plants={f"{SYSTEM}.mixed": mean_over_row},
        scenario=trained(),
        invariants=("F-LM-001",),
        place={"step": 0, "rank": 0},
    ),
    Variant(
        name="lm-labels-not-shifted",
        summary="the target of each token is the token itself",
        source="transformers #3711",
        plants={f"{SYSTEM}.targets_of": not_shifted},
        scenario=trained(),
        invariants=("F-LM-002",),
        place={"step": 0, "rank": 0},
    ),
    Variant(
        name="lm-labels-shifted-twice",
        summary="labels are shifted by the collator and by the model",
        source="transformers #46897, #32944, InternLM #318",
        plants={f"{SYSTEM}.targets_of": shifted_twice},
        scenario=trained(),
        invariants=("F-LM-002",),
        place={"step": 0, "rank": 0},
    ),
    Variant(
        name="lm-padding-counted",
        summary="padding tokens are targets of padding tokens",
        source="open-instruct #632, llama-cookbook #73",
        plants={f"{SYSTEM}.targets_of": padding_counted},
        scenario=trained(rows="padded"),
        invariants=("F-LM-003",),
        place={"step": 0, "rank": 0},
    ),
    Variant(
        name="lm-padding-seen",
        summary="tokens attend to the padding before them",
        source="transformers #46773 (a mask that is skipped for one row), #29029",
        plants={f"{SYSTEM}.sees": padding_seen},
        scenario=trained(rows="padded"),
        invariants=("F-LM-003",),
        place={"step": 0, "rank": 0},
    ),
    Variant(
        name="lm-documents-seen",
        summary="positions start again at each document, but attention crosses documents",
        source="transformers #46634, nanoVLM #204",
        plants={f"{SYSTEM}.sees": documents_seen},
        scenario=trained(rows="packed"),
        invariants=("F-LM-004",),
        place={"step": 0, "rank": 0},
    ),
    Variant(
        name="lm-targets-across",
        summary="the end of a document predicts the first token of the next",
        source="transformers DataCollatorWithFlattening: separator_id, as documented",
        plants={f"{SYSTEM}.targets_of": across, f"{SYSTEM}.document": without_begin},
        scenario=trained(rows="packed"),
        invariants=("F-LM-004",),
        place={"step": 0, "rank": 0},
    ),
    Variant(
        name="lm-mean-per-micro-batch",
        summary="the loss is the mean over micro-batches of their token means",
        source="torchtune #1875, mlx-lm #1413",
        plants={f"{SYSTEM}.divisor": mean_per_micro_batch},
        scenario=trained(rows="padded"),
        invariants=("F-LM-005",),
        place={"step": 0},
    ),
    Variant(
        name="lm-mean-per-rank",
        summary="each rank divides by its own number of tokens",
        source="transformers #34373 (average_tokens_across_devices)",
        plants={f"{SYSTEM}.divisor": mean_per_rank},
        scenario=trained(rows="padded"),
        invariants=("F-LM-005",),
        place={"step": 0},
    ),
    Variant(
        name="lm-untied",
        summary="the output layer has a copy of the embedding",
        source="NeMo RL #227, lingua #75",
        plants={f"{SYSTEM}.tie": untied},
        scenario=trained(),
        invariants=("F-LM-006",),
        place={"step": 0, "rank": 0},
    ),
    Variant(
        name="lm-begin-twice",
        summary="the template and the tokenizer both add a BOS token",
        source="DeepSeek-R1 #151, Generalizable-Reward-Model #6",
        plants={f"{SYSTEM}.document": two_begins},
        scenario=trained(),
        invariants=("F-LM-007",),
        place={"step": 0, "rank": 0},
    ),
    Variant(
        name="lm-left-in-evaluation",
        summary="the model stays in evaluation mode after an evaluation",
        source="mmd #14, coRNN #1",
        plants={f"{SYSTEM}.evaluate": left_in_evaluation},
        scenario=trained(dropout=0.1),
        invariants=("F-LM-008",),
        place={"step": 1, "rank": 0},
    ),
    Variant(
        name="lm-evaluated-with-masks",
        summary="an evaluation runs in training mode, with dropout",
        source="IBM/pytorch-seq2seq #33, pytorch-3dunet #53",
        plants={f"{SYSTEM}.evaluate": evaluated_with_masks},
        scenario=trained(dropout=0.1),
        invariants=("F-LM-008",),
        place={"step": 1, "rank": 0},
    ),
    Variant(
        name="lm-other-masks",
        summary="a block that is recomputed draws different masks",
        source="OLMo-core #828, OLMo #702, guided-diffusion #167",
        plants={f"{SYSTEM}.computed_again": with_other_masks},
        scenario=trained(dropout=0.1),
        invariants=("F-LM-009",),
        place={"step": 0, "rank": 0},
    ),
)
