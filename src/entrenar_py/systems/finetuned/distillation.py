"""Distillation: a small teacher's shards, and a student that learns from them.

Teacher and student are two models of the same family and with the same tokenizer, but with
different weights. The shards are produced as by `entrenar distill logits`, and the student is
trained as in `by_star`.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from entrenar_py.shared import trace
from entrenar_py.shared.errors import EntrenarError
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Trace
from entrenar_py.systems.finetuned import records, small_run
from entrenar_py.systems.finetuned.records import Watched
from entrenar_py.systems.finetuned.small_run import Fixture, Request
from entrenar_py.systems.finetuned.textbook import Textbook
from entrenar_py.systems.star.scenario_run import ScenarioRun
from entrenar_py.systems.star.simulation import SimulatedTransport
from entrenar_py.train.distill import manifest, shards, student
from entrenar_py.train.distill.manifest import Claims, Entry, Facts
from entrenar_py.train.distill.production import Progress, Stage
from entrenar_py.train.distill.shards import File, Rows, ShardWriter
from entrenar_py.train.distill.student import Student
from entrenar_py.train.model import model_folder, preparation
from entrenar_py.train.model.preparation import Prepared
from entrenar_py.train.model.settings import Distillation

SAMPLES = 5  # rows of a shard
ALL = "all"  # value of top_k: the whole vocabulary
_OWN = ("top_k", "temperature", "share")  # options of distillation only


class WatchedStudent(Watched, Student):
    """A student that records which hidden states its loss depends on."""


def run(scenario: Scenario) -> Trace:
    """Produce shards, train the student as `scenario` says, and record both.

    Raises UsageError without the extra `finetune`.
    """
    own = {name: scenario.options[name] for name in _OWN if name in scenario.options}
    plain = {name: one for name, one in scenario.options.items() if name not in _OWN}
    request = Request.of(scenario.with_(options=plain))
    with small_run.quiet(), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fixture = _made(folder, scenario, request, own)
        prepared = preparation.prepare(fixture.settings, folder / "cache")
        events: list[trace.Event] = [*_stages(prepared, folder)]
        workload = student.workload(prepared, WatchedStudent)
        assert isinstance(workload, WatchedStudent), "it was asked for"
        training = ScenarioRun(scenario, SimulatedTransport, workload)
        done = training.train()
        if done.end.status != "completed":
            return done
        if "samples" in request.facts:
            events += records.sample_events(fixture, prepared, workload)
            events += _rows(fixture, prepared, workload)
        if "gradients" in request.facts:
            final = training.server.replica.replica.arrays
            shapes = {name: array.shape for name, array in final.items()}
            events += SoftTextbook(fixture, request, shapes, workload).steps(done)
        if "refusals" in request.facts:
            events += _turned_away(prepared, folder)
    return replace(done, events=(*done.events[:-1], *events, done.events[-1]))


def _made(folder: Path, scenario: Scenario, request: Request, own: Mapping[str, Any]) -> Fixture:
    """Write both checkpoints and the rows."""
    fixture = small_run.make(folder, scenario, request)
    small_run.teacher(folder / "teacher", fixture, request, scenario)
    top_k = own.get("top_k", 8)
    if top_k == ALL:
        top_k = student.vocabulary_of(model_folder.configuration(fixture.settings))
    section = Distillation(
        logits=folder / "shards",
        teacher=folder / "teacher",
        top_k=int(top_k),
        alpha=float(own.get("share", 0.5)),
        temperature=float(own.get("temperature", 2.0)),
        stored="float32",
        precision="float32",
        shard_samples=SAMPLES,
        batch_tokens=64,
        wait_s=0.0,
    )
    return replace(fixture, settings=replace(fixture.settings, distill=section))


def _stages(prepared: Prepared, folder: Path) -> Iterator[trace.Sharded]:
    """Yield a record of shards made in one run, then of the same shards made in two runs."""
    section = student.of(prepared)
    yield _made_by(prepared, "made at once")
    again = folder / "again"
    elsewhere = replace(section, logits=again)
    other = replace(prepared, settings=replace(prepared.settings, distill=elsewhere))
    yield _made_by(other, "stopped after a shard", stops=True)
    for path in again.glob("*.parquet"):
        # damaged meanwhile, so it has to be produced again
        path.write_bytes(path.read_bytes()[:-1])
        break
    yield _made_by(other, "resumed")


def _made_by(prepared: Prepared, when: str, *, stops: bool = False) -> trace.Sharded:
    stopping, num_heard = threading.Event(), 0

    def heard(_: Progress) -> None:  # called before each shard, and at the end
        nonlocal num_heard
        num_heard += 1
        if stops and num_heard > 1:
            stopping.set()

    stage = Stage(prepared, "cpu")
    complete = stage.run(heard, stopping)
    listed = manifest.read(stage.folder)
    shards = {} if listed is None else listed.shards
    return trace.Sharded(
        when=when,
        digests=tuple(f"{n}:{_digest(stage, shards[n])}" for n in sorted(shards)),
        complete=complete,
        due=stage.facts.num_shards,
    )


def _digest(stage: Stage, entry: Entry) -> str:
    path = manifest.path_of(stage.folder, stage.facts, entry.shard)
    return shards.digest_of(path) if path.exists() else "not there"


def _rows(fixture: Fixture, prepared: Prepared, workload: Student) -> Iterator[trace.TeacherRow]:
    """Yield each row of each shard, compared with stock transformers in float64."""
    from transformers import AutoModelForCausalLM

    section = student.of(prepared)
    assert section.teacher is not None, "a teacher was made"
    model: Any = AutoModelForCausalLM.from_pretrained(section.teacher, local_files_only=True)
    model = model.double().eval()
    facts = workload.teacher.facts
    stock = []
    for tokens, _ in records.stock_rows(fixture):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokens])).logits[0]
        stock.append(logits.log_softmax(-1))
    places = student.places(prepared.train, facts.seed, max(facts.samples))
    for shard in range(facts.num_shards):
        rows = _read(section.shards, facts, shard, places.starts(shard))
        for row in range(len(rows)):
            sample, position = int(rows.sample[row]), int(rows.position[row])
            yield trace.TeacherRow(
                shard=shard,
                sample=sample,
                position=position,
                tokens=tuple(rows.tokens[row].tolist()),
                log_probabilities=tuple(rows.log_probabilities[row].astype(float).tolist()),
                rest=float(np.exp(rows.rest[row])),
                stock=tuple(stock[sample][position].tolist()),
            )


def _turned_away(prepared: Prepared, folder: Path) -> Iterator[trace.TurnedAway]:
    """Give the student wrong shards, and record whether it accepts them."""
    section = student.of(prepared)
    others = _Others(prepared, folder / "others")
    changes: dict[str, Callable[[], None]] = {
        "shards of another tokenizer": others.of_another_tokenizer,
        "half of a shard": others.halve,
        "a shard with a bit turned": others.turn_a_bit,
        "a shard that is missing": others.remove,
        "a shard in another's place": others.exchange,
        "rows of other samples": others.reverse_rows,
    }
    for what, change in changes.items():
        shutil.copytree(section.shards, others.folder)
        change()
        settings = replace(prepared.settings, distill=replace(section, logits=others.folder))
        try:
            workload = student.workload(replace(prepared, settings=settings))
            workload.batch(range(len(prepared.train)))
            event = trace.TurnedAway(what=what, refused=None)
        except EntrenarError as error:
            refused = str(error).replace(str(folder), "")
            event = trace.TurnedAway(what=what, refused=refused, error_kind=error.kind)
        shutil.rmtree(others.folder)
        yield event


class _Others:
    """A copy of a run's shards to corrupt, with a manifest that stays consistent."""

    def __init__(self, prepared: Prepared, folder: Path) -> None:
        self.folder, self._prepared = folder, prepared
        self._facts = student.facts_of(prepared)
        seed, num_each = self._facts.seed, max(self._facts.samples)
        self._places = student.places(prepared.train, seed, num_each)

    def of_another_tokenizer(self) -> None:
        """Label all shards as another tokenizer's, in the files and in the manifest."""
        self._write(replace(self._facts, tokenizer="0" * 32), lambda rows: rows)

    def reverse_rows(self) -> None:
        """Write the rows of each shard in reverse order."""
        self._write(self._facts, lambda rows: rows.taken(np.arange(len(rows))[::-1]))

    def halve(self) -> None:
        """Truncate the last shard's file, as if it were still being copied."""
        path = sorted(self.folder.glob("*.parquet"))[-1]
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    def turn_a_bit(self) -> None:
        """Flip a bit in the rows of the last shard's file."""
        path = sorted(self.folder.glob("*.parquet"))[-1]
        held = bytearray(path.read_bytes())
        held[len(held) // 3] ^= 1
        path.write_bytes(held)

    def remove(self) -> None:
        """Remove the first shard's file."""
        min(self.folder.glob("*.parquet")).unlink()

    def exchange(self) -> None:
        """Replace the second shard's file by the first one, also in the manifest."""
        listed = manifest.read(self.folder)
        assert listed is not None, "it was made here"
        first, other = (manifest.path_of(self.folder, self._facts, n) for n in (0, 1))
        shutil.copy(first, other)
        own = listed.shards[0]
        moved = replace(listed.shards[1], bytes=own.bytes, digest=own.digest)
        self._list(self._facts, {**listed.shards, 1: moved}.values())

    def _write(self, facts: Facts, change: Callable[[Rows], Rows]) -> None:
        entries = []
        for shard in range(facts.num_shards):
            starts = self._places.starts(shard)
            rows = change(_read(student.of(self._prepared).shards, self._facts, shard, starts))
            with closing(ShardWriter(self.folder, facts, shard, starts)) as file:
                file.add(rows)
                entries.append(file.finish())
        self._list(facts, entries)

    def _list(self, facts: Facts, entries: Iterable[Entry]) -> None:
        (self.folder / manifest.name_of(None)).unlink()
        with closing(Claims(self.folder)) as claims:
            writer = manifest.Writer(self.folder, facts, None, claims)
            for entry in entries:
                writer.add(entry)


def _read(folder: Path, facts: Facts, shard: int, starts: Any) -> Rows:
    file = File(folder, facts, shard, starts)
    return shards.joined([file.read(n) for n in range(len(shards.groups(facts, starts)))])


class SoftTextbook(Textbook):
    """`Textbook` with a teacher: the loss is alpha T^2 KL + (1 - alpha) times the cross entropy.

    KL compares the teacher's and the student's distribution; with a top k, all other tokens count
    as one class. The teacher's rows come from the shards, which F-KD-008 compares with the
    teacher's own outputs.
    """

    def __init__(self, fixture: Fixture, request: Request, shapes: Any, workload: Student) -> None:
        super().__init__(fixture, request, shapes)
        self._workload = workload
        self._rows: Rows | None = None

    def batch(self, ids: Any) -> tuple[Tensor, Tensor, Tensor]:
        """See `Textbook`."""
        self._rows = self._workload.teacher.rows(ids)
        return super().batch(ids)

    def constants(self) -> list[Tensor]:
        """Return the teacher's rows of the last batch, and how the losses are mixed."""
        rows, mix = self._rows, self._workload.mix
        assert rows is not None, "a batch was asked for"
        columns = (rows.sample, rows.position, rows.tokens, rows.log_probabilities, rows.rest)
        mixed = torch.tensor([mix.alpha, mix.temperature, mix.has_rest], dtype=torch.float64)
        return [mixed, *map(torch.from_numpy, columns)]

    def loss(self, tensors: Mapping[str, Tensor], tokens: Tensor, mask: Tensor, due: Tensor) -> Any:
        """See `Textbook`."""
        rows, mix = self._rows, self._workload.mix
        assert rows is not None, "a batch was asked for"
        logs = torch.log_softmax(self.outputs(tensors, tokens, mask), -1)[:, :-1].flatten(0, 1)
        counted = torch.from_numpy(np.flatnonzero(self._counted(rows, tokens.shape)))
        logs = logs.index_select(0, counted)
        kept = torch.from_numpy(rows.tokens.astype(np.int64))
        student = logs.gather(1, kept)
        teacher = torch.from_numpy(rows.log_probabilities.astype(np.float32))
        targets = tokens[:, 1:].flatten().index_select(0, counted)
        entropy = -logs.gather(1, targets[:, None]).sum()
        if mix.has_rest:
            is_kept = torch.zeros_like(logs.detach()).scatter(1, kept, 1.0)
            others = (logs.exp() * (1 - is_kept)).sum(1, keepdim=True).log()
            student = torch.cat([student, others], 1)
            teacher = torch.cat([teacher, torch.from_numpy(rows.rest)[:, None]], 1)
        found, wanted = student / mix.temperature, teacher / mix.temperature
        q = torch.softmax(wanted, 1)
        apart = (q * (torch.log_softmax(wanted, 1) - torch.log_softmax(found, 1))).sum()
        whole = mix.alpha * mix.temperature**2 * apart + (1 - mix.alpha) * entropy
        return whole / due[:, 1:].sum()

    @staticmethod
    def _counted(rows: Rows, shape: Any) -> Any:
        number, length = shape
        order = {one: place for place, one in enumerate(dict.fromkeys(rows.sample.tolist()))}
        table = np.zeros((number, length - 1), bool)
        table[[order[one] for one in rows.sample.tolist()], rows.position] = True
        return table
