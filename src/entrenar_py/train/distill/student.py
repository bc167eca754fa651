"""The student's loss on a teacher's shards, computed without ever holding all logits.

    alpha T^2 KL(teacher_T || student_T) + (1 - alpha) cross entropy        (Hinton et al., 2015)

It is summed over positions. The classes of the teacher's distribution are its k most likely tokens
and, as one more class, all other tokens together. The student's distribution is put into the same
classes. Both are then raised to 1 / T and normalised. If all tokens are kept, there is no class of
other tokens, and the divergence is the one of softmax(z / T). Everything is computed in float32,
from log-softmax.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.arithmetic import sharding
from entrenar_py.train.arithmetic.tensors import Batch
from entrenar_py.train.distill import manifest, shards
from entrenar_py.train.distill.manifest import Facts
from entrenar_py.train.distill.shards import Places, TeacherRows
from entrenar_py.train.model import model_folder, objectives, precision, preparation
from entrenar_py.train.model.objectives import IGNORED, NextTokens, Objective
from entrenar_py.train.model.preparation import Prepared
from entrenar_py.train.model.samples import Samples
from entrenar_py.train.model.settings import Distillation, Settings
from entrenar_py.train.model.workload import Finetuning


@dataclass(frozen=True)
class Mix:
    """The weights of the two parts of the loss: `alpha` in [0, 1], and the temperature T > 0.

    `has_rest` is False if the teacher's rows have every token of the student's vocabulary.
    """

    alpha: float
    temperature: float
    has_rest: bool


class Taught(NamedTuple):
    """The training data of m positions: `targets`, int64 [m], is negative where there is none.

    From the teacher come `tokens`, int64 [m, k], `log_probabilities` [m, k], and `rest` [m], the
    log of the total probability of all other tokens.
    """

    targets: Tensor
    tokens: Tensor
    log_probabilities: Tensor
    rest: Tensor


def divergence(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """Return T^2 KL(teacher_T || student_T) of each row, float32 [m].

    Both arguments are log-probabilities [m, classes] at temperature 1. A class to which the teacher
    gives probability 0 (-inf) adds nothing.
    """
    wanted = (teacher / temperature).log_softmax(-1)
    own = (student / temperature).log_softmax(-1)
    shares = wanted.exp()
    # 0 * (-inf - x) is NaN, and a class with probability 0 adds nothing to the divergence.
    terms = torch.where(shares > 0, shares * (wanted - own), 0.0)
    return temperature**2 * terms.sum(-1)


def of_teacher(taught: Taught, mix: Mix) -> Tensor:
    """Return the teacher's log-probabilities by class, float32 [m, k] or [m, k + 1]."""
    kept = taught.log_probabilities.float()
    return torch.cat([kept, taught.rest.float()[:, None]], -1) if mix.has_rest else kept


def of_logits(logits: Tensor, taught: Taught, mix: Mix) -> Tensor:
    """Return the summed loss of `logits` [m, vocabulary], 0-d float32."""
    logs = logits.float().log_softmax(-1)
    is_there = taught.targets >= 0
    student = logs.gather(1, taught.tokens)
    if mix.has_rest:
        others = logs.scatter(1, taught.tokens, -torch.inf).logsumexp(-1, keepdim=True)
        student = torch.cat([student, others], -1)
    apart = divergence(of_teacher(taught, mix), student, mix.temperature)
    entropy = -logs.gather(1, taught.targets.clamp(min=0)[:, None])[:, 0]
    mixed = mix.alpha * apart + (1 - mix.alpha) * entropy
    return torch.where(is_there, mixed, 0.0).sum()


def of_hidden(hidden: Tensor, weight: Tensor, taught: Taught, mix: Mix) -> Tensor:
    """Return `of_logits` of `hidden @ weight.T`, computed for some hundred positions at a time.

    `hidden` is [m, d], and `weight` [vocabulary, d]. Matrix products have the dtype of
    torch.autocast where that is on.
    """
    dtype = precision.current(hidden.device)
    if dtype != torch.float32:
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    with precision.as_given(hidden.device):
        given = hidden, weight, taught.targets, taught.tokens, of_teacher(taught, mix), mix
        result: Tensor = _Distilled.apply(*given)  # type: ignore[no-untyped-call]
    return result


class _Distilled(torch.autograd.Function):
    """See `of_hidden`. The gradients are computed in the forward pass, at scale 1.

    Let u be the student's log-probabilities by class, s = softmax(u / T), and q the teacher's
    probabilities at temperature T. The derivative of the divergence with respect to u is T (s - q),
    which sums to 0. So the derivative with respect to the logit of a kept token is T (s - q) of its
    class. For any other token it is T (s - q) of the rest, times the token's share of the rest.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        tokens: Tensor,
        teacher: Tensor,
        mix: Mix,
    ) -> Tensor:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        loss = torch.zeros((), device=hidden.device)
        of_hidden = torch.empty_like(hidden) if wants_hidden else None
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        rows = max(1, objectives.LOGITS_MAX // len(weight))
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            logits = (hidden[part] @ weight.t()).float()
            summed, gradient = _loss_and_gradient(
                logits, targets[part], tokens[part], teacher[part], mix
            )
            loss += summed
            gradient = gradient.to(hidden.dtype)
            if of_hidden is not None:
                torch.mm(gradient, weight, out=of_hidden[part])
            if of_weight is not None:
                of_weight += gradient.t() @ hidden[part]
        ctx.save_for_backward(of_hidden, None if of_weight is None else of_weight.to(weight.dtype))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        found = (None if one is None else one * scale.to(one.dtype) for one in ctx.saved_tensors)
        return (*found, None, None, None, None)


def _loss_and_gradient(
    logits: Tensor, targets: Tensor, tokens: Tensor, teacher: Tensor, mix: Mix
) -> tuple[Tensor, Tensor]:
    """Return the summed loss of some positions, and its gradient [m, vocabulary].

    `logits` is float32, and its memory is reused for the gradient. Most of the time goes into the
    six passes over the vocabulary.
    """
    alpha, temperature = mix.alpha, mix.temperature
    is_there = targets >= 0
    wanted = targets.clamp(min=0)[:, None]
    kept, target = logits.gather(1, tokens), logits.gather(1, wanted)
    whole, student = kept.logsumexp(-1, keepdim=True), kept
    if mix.has_rest:
        _put(logits, tokens, torch.full_like(kept, -torch.inf))
        top = logits.amax(-1, keepdim=True)
        # Relative to their own maximum: next to a near-certain token, all others may underflow.
        logits -= top
        mass = logits.exp_().sum(-1, keepdim=True)
        rest = mass.log() + top
        whole = torch.logaddexp(whole, rest)
        student = torch.cat([kept, rest], -1)
    student = student - whole
    entropy = (whole - target)[:, 0]
    own = (student / temperature).log_softmax(-1)
    shares = (teacher / temperature).log_softmax(-1).exp()
    loss = alpha * divergence(teacher, student, temperature) + (1 - alpha) * entropy
    counts = is_there[:, None].to(logits.dtype)
    # Gradient by class: of the divergence, and of the cross entropy except for the target's -1.
    parts = alpha * temperature * (own.exp() - shares) + (1 - alpha) * student.exp()
    parts *= counts
    if mix.has_rest:
        logits *= parts[:, -1:] / mass
    _put(logits, tokens, parts[:, : tokens.shape[1]])
    _put(logits, wanted, logits.gather(1, wanted) - (1 - alpha) * counts)
    return torch.where(is_there, loss, 0.0).sum(), logits


def _put(into: Tensor, columns: Tensor, values: Tensor) -> None:
    """Write `values` [m, k] into the `columns`, int64 [m, k], of each row. Columns are distinct.

    So any kernel gives the same bits. Kernels for columns that may repeat would wait for the GPU.
    """
    is_on = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    # Not `torch.use_deterministic_algorithms`: it makes torch recompile a model's blocks.
    torch._C._set_deterministic_algorithms(False)
    try:
        into.scatter_(1, columns, values)
    finally:
        torch._C._set_deterministic_algorithms(is_on, warn_only=only_warns)


_UNPACKED = 6  # tensors of a batch without packing; packed rows add their positions


class Student(Finetuning):
    """The workload of `module`, which learns next tokens and a teacher's distributions of them."""

    def __init__(
        self,
        module: nn.Module,
        train: Samples,
        *,
        teacher: TeacherRows,
        mix: Mix,
        **options: Any,
    ) -> None:
        """Take the arguments of `Finetuning`, the teacher's rows, and the weights of the loss."""
        self.teacher, self.mix = teacher, mix
        super().__init__(module, train, **options)
        # A worker with different shards has different data.
        self.data_digest = blake3(f"{train.digest} {teacher.facts.digest}".encode()).hexdigest(16)

    def new_objective(self, class_weights: Sequence[float]) -> Objective:
        """Return the module that computes the summed loss of a batch."""
        return StudentObjective(self.module, self.mix, self.teacher.facts.top_k)

    @property
    def decisive(self) -> dict[str, Any]:
        """See `train.model.workload.Tuned`."""
        return {
            "distill.shards": self.teacher.facts.digest,
            "distill.alpha": self.mix.alpha,
            "distill.temperature": self.mix.temperature,
        }

    @property
    def may_wait(self) -> bool:
        """See `Workload`."""
        return self.teacher.patience_s > 0

    def interrupt(self) -> None:
        """See `Workload`."""
        self.teacher.interrupt()

    def require(self, ids: Sequence[int]) -> None:
        """Wait until the teacher's rows of all samples `ids` exist."""
        self.teacher.require(ids)

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, ...]:
        """Return the tensors that the loss is a function of; waits for rows that don't exist yet.

        These are: tokens int64 [n, t]; places with a target, int64 [m], as indices into n * t;
        their targets, int64 [m]; and the teacher's tokens int64 [m, k], log-probabilities float32
        [m, k] and log of the rest float32 [m] at these places. If samples are packed, positions
        int64 [n, t] follow.
        """
        tokens, places, targets, *positions = super().batch(ids)
        order = list(range(len(ids)))
        if self.packed_tokens is not None:
            lengths = [self._samples.length(i) for i in ids]
            order = [n for row in objectives.rows_of(lengths, self.packed_tokens) for n in row]
        rows = self.teacher.rows([ids[number] for number in order])
        num_targets = int((targets != IGNORED).sum())
        assert len(rows) == num_targets, "the teacher has a row for each target"
        # Padding rows have distinct tokens, as every row has.
        room, top_k = len(targets) - len(rows), rows.tokens.shape[1]
        filling = np.broadcast_to(np.arange(top_k, dtype=np.int64), (room, top_k))
        return (
            tokens,
            places,
            targets,
            torch.from_numpy(np.concatenate([rows.tokens.astype(np.int64), filling])),
            torch.from_numpy(_filled(rows.log_probabilities.astype(np.float32), room)),
            torch.from_numpy(_filled(rows.rest, room)),
            *positions,
        )


def _filled(values: Any, room: int) -> Any:
    return np.concatenate([values, np.zeros((room, *values.shape[1:]), values.dtype)])


class StudentObjective(NextTokens):
    """The loss of a student's batch, as a module."""

    def __init__(self, module: nn.Module, mix: Mix, top_k: int) -> None:
        super().__init__(module)
        self._mix, self._top_k = mix, top_k

    def kind(self, batch: Batch) -> tuple[bool, ...]:
        """Return what the operations depend on: if there is one row, and if rows are packed."""
        return len(batch[0]) == 1, len(batch) > _UNPACKED

    def example(self, kind: tuple[bool, ...], length: int) -> tuple[Tensor, ...]:
        """Return a batch of `kind` with rows of `length` tokens."""
        tokens, places, targets, *positions = super().example(kind, length)
        kept = torch.arange(self._top_k).expand(len(places), -1).contiguous()
        shares = torch.full(kept.shape, -1.0)
        return tokens, places, targets, kept, shares, torch.full((len(places),), -1.0), *positions

    def forward(self, *batch: Tensor) -> Tensor:
        """Return the summed loss of a result of `Student.batch`, 0-d float32."""
        tokens, places, targets, kept, shares, rest, *positions = batch
        taught = Taught(targets, kept, shares, rest)
        packed = positions[0] if positions else None
        head = self.fused_head(tokens)
        if head is None:
            logits = self.logits_of(tokens, packed).index_select(0, places)
            return of_logits(logits, taught, self._mix)
        hidden = self.hidden_of(tokens, places, packed, head)
        return of_hidden(hidden, head.weight, taught, self._mix)


def facts_of(prepared: Prepared, ended: threading.Event | None = None) -> Facts:
    """Return the facts of a run's shards, once a first list of them exists.

    Raises UsageError if they have another tokenizer, other rows or other settings, and
    SystemFailure if `ended` is set while there is no list.
    """
    section, ended = of(prepared), ended or threading.Event()
    facts = shards.facts_of(section.shards, patience_s=section.wait_s, ended=ended)
    require_fitting(prepared, section, facts)
    return facts


def of(prepared: Prepared) -> Distillation:
    """Return the section `distill`. Raises UsageError if the configuration has none."""
    section = prepared.settings.distill
    if section is None:
        raise UsageError(
            "distill: the section is missing: it names the teacher and the folder of its shards"
        )
    return section


def day_of(settings: Settings) -> str:
    """Return the day of a run: that of its teacher's shards, else of its ledger, else today."""
    section = settings.distill
    shards_day = manifest.day_of(section.shards) if section and section.logits else None
    return shards_day or preparation.day_of(settings)


def require_fitting(prepared: Prepared, section: Distillation, facts: Facts) -> None:
    """Raise UsageError unless the shards have the run's tokenizer, rows and settings."""
    own = manifest.vocabulary_digest(prepared.tokenizer)
    where = f"distill.logits={section.shards}"
    if facts.tokenizer != own:
        raise UsageError(
            f"{where}: its shards were made with the tokenizer {facts.tokenizer}, but "
            f"the student's is {own} ({prepared.settings.model}): their tokens are not "
            "the same; learn from the teacher's answers instead, by `entrenar distill "
            "text`",
            kind="tokenizer",
        )
    if facts.data != prepared.train.digest:
        raise UsageError(
            f"{where}: its shards were made from rows ({facts.data}) other than data.train's "
            f"({prepared.train.digest}); {manifest.advice_on_day(facts, prepared.day)}use the "
            "configuration that they were made with, or make them again in another folder"
        )
    for name in ("top_k", "stored", "precision", "shard_samples"):
        stored = max(facts.samples) if name == "shard_samples" else getattr(facts, name)
        wanted = getattr(section, name)
        if name == "shard_samples":
            wanted = min(wanted, len(prepared.train))
        if stored != wanted:
            raise UsageError(
                f"{where}: its shards were made with {name}={stored}, and distill.{name} is "
                f"{wanted}; use the same, or make them again in another folder"
            )


def places(train: Samples, seed: int, num_each: int) -> Places:
    """Return the places of each sample's rows, in shards of `num_each` samples.

    Samples are in the order in which a run with `seed` first visits them.
    """
    order = sharding.order(len(train), preparation.seeds(seed).rng("order", 0))
    return Places(train, order, num_each)


def workload(
    prepared: Prepared, kind: type[Student] = Student, ended: threading.Event | None = None
) -> Finetuning:
    """Return the workload of a run: a student of class `kind` if it learns from a teacher.

    Raises as `Prepared.workload` and `facts_of` do.
    """
    section = prepared.settings.distill
    if section is None:
        return prepared.workload()
    ended = ended or threading.Event()
    facts = facts_of(prepared, ended)
    # Heads of one model family may be padded to different sizes, with tokens no tokenizer has.
    vocabulary = vocabulary_of(model_folder.configuration(prepared.settings))
    if vocabulary != facts.vocabulary and not facts.has_rest:
        raise UsageError(
            f"distill.logits={section.shards}: its rows have all of the teacher's "
            f"{facts.vocabulary} logits, but the student has only {vocabulary} "
            f"({prepared.settings.model}); make them with a smaller top_k"
        )
    # A teacher keeps only tokens that the tokenizer has, unless top_k is larger than their number.
    known = manifest.num_tokens(prepared.tokenizer)
    if vocabulary < min(known, facts.vocabulary):
        raise UsageError(
            f"model={prepared.settings.model}: it has {vocabulary} logits, but its tokenizer has "
            f"{known} tokens; the teacher's rows may have any of these; use a student with a "
            "logit for each"
        )
    if vocabulary < facts.vocabulary and facts.top_k > known:
        raise UsageError(
            f"distill.logits={section.shards}: its rows have {facts.top_k} of the teacher's "
            f"{facts.vocabulary} logits; the student has only {vocabulary} of them, and the "
            f"tokenizer {known}; make them with top_k={known} or less"
        )
    rows = TeacherRows(
        section.shards,
        facts,
        places(prepared.train, facts.seed, max(facts.samples)),
        num_tokens=min(vocabulary, facts.vocabulary),
        patience_s=section.wait_s,
        ended=ended,
    )
    # A student with only the kept tokens gives the rest no mass, so the rest is left out.
    mix = Mix(section.alpha, section.temperature, facts.top_k < vocabulary)
    return prepared.workload(kind, teacher=rows, mix=mix)


def vocabulary_of(config: Any) -> int:
    """Return the number of logits of a language model with this configuration."""
    return int(config.get_text_config().vocab_size)
