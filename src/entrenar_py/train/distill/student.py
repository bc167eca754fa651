"""A student: a fine-tuning whose loss learns from a teacher's rows, too."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor, nn

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.arithmetic import sharding
from entrenar_py.train.arithmetic.tensors import Batch
from entrenar_py.train.distill import loss as losses
from entrenar_py.train.distill import reading, schema
from entrenar_py.train.distill.loss import Mix, Taught
from entrenar_py.train.distill.reading import TeacherRows
from entrenar_py.train.distill.schema import Facts
from entrenar_py.train.distill.shards import Places
from entrenar_py.train.model import model_class, packing
from entrenar_py.train.model import prepared as preparing
from entrenar_py.train.model.objectives import IGNORED, NextTokens, Objective
from entrenar_py.train.model.prepared import Prepared
from entrenar_py.train.model.samples import Samples
from entrenar_py.train.model.settings import Distillation
from entrenar_py.train.model.workload import Finetuning

_UNPACKED = 6  # tensors of a batch; packed rows have their positions, too


class Student(Finetuning):
    """Next tokens, and a teacher's distributions of them, learned by `module`."""

    def __init__(
        self,
        module: nn.Module,
        train: Samples,
        *,
        teacher: TeacherRows,
        mix: Mix,
        **options: Any,
    ) -> None:
        """Take the arguments of `Finetuning`, the teacher's rows and how they count."""
        self.teacher, self.mix = teacher, mix
        super().__init__(module, train, **options)
        # A worker whose shards are others has other data.
        self.data_digest = blake3(f"{train.digest} {teacher.facts.digest}".encode()).hexdigest(16)

    def new_objective(self, class_weights: Sequence[float]) -> Objective:
        """Return the module that computes the summed loss of a batch."""
        return StudentObjective(self.module, self.mix, self.teacher.facts.top_k)

    @property
    def decisive(self) -> dict[str, Any]:
        """See `Tuned`."""
        return {
            "distill.shards": self.teacher.facts.digest,
            "distill.alpha": self.mix.alpha,
            "distill.temperature": self.mix.temperature,
        }

    def interrupt(self) -> None:
        """See `Workload`."""
        self.teacher.interrupt()

    def require(self, ids: Sequence[int]) -> None:
        """Wait until the teacher's rows of all samples `ids` are there."""
        self.teacher.require(ids)

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, ...]:
        """Return what the loss is a function of; waits for rows that are still to come.

        That is tokens int64 [n, t], places with a target int64 [m], of n * t, these targets int64
        [m], and of the teacher there tokens int64 [m, k], log-probabilities float32 [m, k] and the
        log of the rest float32 [m]. If samples are packed, positions int64 [n, t] follow.
        """
        tokens, places, targets, *positions = super().batch(ids)
        order = list(range(len(ids)))
        if self.packed_tokens is not None:
            lengths = [self._samples.length(i) for i in ids]
            order = [n for row in packing.rows_of(lengths, self.packed_tokens) for n in row]
        rows = self.teacher.rows([ids[number] for number in order])
        num_targets = int((targets != IGNORED).sum())
        assert len(rows) == num_targets, "the teacher has a row for each target"
        # What fills up has distinct tokens, as every row has.
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
    """Return `values` and `room` rows of zeros."""
    return np.concatenate([values, np.zeros((room, *values.shape[1:]), values.dtype)])


class StudentObjective(NextTokens):
    """The loss of a student's batch."""

    def __init__(self, module: nn.Module, mix: Mix, top_k: int) -> None:
        super().__init__(module)
        self._mix, self._top_k = mix, top_k

    def kind(self, batch: Batch) -> tuple[bool, ...]:
        """Return on what the operations depend: if it is one row, and if rows are packed."""
        return len(batch[0]) == 1, len(batch) > _UNPACKED

    def example(self, kind: tuple[bool, ...], length: int) -> tuple[Tensor, ...]:
        """Return a batch of `kind` with rows of `length` tokens."""
        tokens, places, targets, *positions = super().example(kind, length)
        kept = torch.arange(self._top_k).expand(len(places), -1).contiguous()
        shares = torch.full(kept.shape, -1.0)
        return tokens, places, targets, kept, shares, torch.full((len(places),), -1.0), *positions

    def forward(self, *batch: Tensor) -> Tensor:
        """Return the summed loss of what `Student.batch` returned, 0-d float32."""
        tokens, places, targets, kept, shares, rest, *positions = batch
        taught = Taught(targets, kept, shares, rest)
        packed = positions[0] if positions else None
        head = self.fused_head(tokens)
        if head is None:
            logits = self.logits_of(tokens, packed).index_select(0, places)
            return losses.of_logits(logits, taught, self._mix)
        hidden = self.hidden_of(tokens, places, packed, head)
        return losses.of_hidden(hidden, head.weight, taught, self._mix)


def facts_of(prepared: Prepared, ended: threading.Event | None = None) -> Facts:
    """Return the facts of a run's shards, once a first list of them is there.

    Raises UsageError if they are of another tokenizer, of other rows, or of other settings, and
    SystemFailure if `ended` is set while there is none.
    """
    section, ended = of(prepared), ended or threading.Event()
    facts = reading.facts_of(section.shards, patience_s=section.wait_s, ended=ended)
    require_fitting(prepared, section, facts)
    return facts


def of(prepared: Prepared) -> Distillation:
    """Return the section `distill`; raises UsageError if the configuration has none."""
    section = prepared.settings.distill
    if section is None:
        raise UsageError(
            "distill: the section is missing: it names the teacher and the folder of its shards"
        )
    return section


def require_fitting(prepared: Prepared, section: Distillation, facts: Facts) -> None:
    """Raise UsageError unless the shards are of the run's tokenizer, rows and settings."""
    own = schema.vocabulary_digest(prepared.tokenizer)
    where = f"distill.logits={section.shards}"
    if facts.tokenizer != own:
        raise UsageError(
            f"{where}: its shards are of the tokenizer {facts.tokenizer}, and the student's is "
            f"{own} ({prepared.settings.model}): their tokens are not the same; learn from the "
            "teacher's answers instead, by `entrenar distill text`"
        )
    if facts.data != prepared.train.digest:
        raise UsageError(
            f"{where}: its shards are of other rows ({facts.data}) than data.train gives "
            f"({prepared.train.digest}); use the configuration that they were made with, or make "
            "them again in another folder"
        )
    for name in ("top_k", "stored", "precision", "shard_samples"):
        made = max(facts.samples) if name == "shard_samples" else getattr(facts, name)
        asked = getattr(section, name)
        if name == "shard_samples":
            asked = min(asked, len(prepared.train))
        if made != asked:
            raise UsageError(
                f"{where}: its shards were made with {name}={made}, and distill.{name} is {asked}; "
                "use the same, or make them again in another folder"
            )


def places(train: Samples, seed: int, num_each: int) -> Places:
    """Return where each sample's rows are in shards of `num_each` samples.

    Their order is that in which a run with `seed` first visits them.
    """
    order = sharding.order(len(train), preparing.seeds(seed).rng("order", 0))
    return Places(train, order, num_each)


def workload(
    prepared: Prepared, kind: type[Student] = Student, ended: threading.Event | None = None
) -> Finetuning:
    """Return the workload of a run, a `kind` of student if it learns from a teacher.

    Raises as `Prepared.workload` and `facts_of` do.
    """
    section = prepared.settings.distill
    if section is None:
        return prepared.workload()
    ended = ended or threading.Event()
    facts = facts_of(prepared, ended)
    # Heads of one family may be filled up to other sizes, with tokens that no tokenizer has.
    vocabulary = vocabulary_of(model_class.configuration(prepared.settings))
    if vocabulary != facts.vocabulary and not facts.has_rest:
        raise UsageError(
            f"distill.logits={section.shards}: its rows have all of the teacher's "
            f"{facts.vocabulary} logits, and the student has {vocabulary} "
            f"({prepared.settings.model}); make them with a smaller top_k"
        )
    # A teacher keeps tokens that the tokenizer has, unless more are asked for than there are.
    known = schema.num_tokens(prepared.tokenizer)
    if vocabulary < min(known, facts.vocabulary):
        raise UsageError(
            f"model={prepared.settings.model}: it has {vocabulary} logits, and its tokenizer "
            f"{known} tokens, of which the teacher's rows have any; use a student with a logit for "
            "each"
        )
    if vocabulary < facts.vocabulary and facts.top_k > known:
        raise UsageError(
            f"distill.logits={section.shards}: its rows have {facts.top_k} of the teacher's "
            f"{facts.vocabulary} logits, of which the student has {vocabulary} and the tokenizer "
            f"{known}; make them with top_k={known} or less"
        )
    rows = TeacherRows(
        section.shards,
        facts,
        places(prepared.train, facts.seed, max(facts.samples)),
        num_tokens=min(vocabulary, facts.vocabulary),
        patience_s=section.wait_s,
        ended=ended,
    )
    mix = Mix(section.alpha, section.temperature, facts.has_rest)
    return prepared.workload(kind, teacher=rows, mix=mix)


def vocabulary_of(config: Any) -> int:
    """Return the number of logits of a language model with this configuration."""
    return int(config.get_text_config().vocab_size)
