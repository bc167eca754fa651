"""Tells from how many rows a run learns, and which rows it leaves out."""

from __future__ import annotations

from collections.abc import Sequence

from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.untrusted import escaping, printing
from entrenar_py.shared.wording import counted
from entrenar_py.train.distill.student import Student
from entrenar_py.train.model import model_class, samples
from entrenar_py.train.model.prepared import Prepared
from entrenar_py.train.model.rows import BadRow

SKIPPED = "skipped.txt"  # in the output folder


def say(prepared: Prepared) -> None:
    """Print the numbers of samples, and the first rows that were skipped."""
    for what, found in (("train", prepared.train), ("validation", prepared.validation)):
        if found is not None:
            printing.say(f"{what}: {counted(len(found), 'sample')}")
    say_skipped(_skipped(prepared))


def say_teacher(workload: object) -> None:
    """Print from which teacher's shards the run learns, if it learns from any.

    The checkpoint that the configuration names need not be here, so nothing is compared with it.
    """
    if isinstance(workload, Student):
        facts = workload.teacher.facts
        printing.say(
            f"teacher: {facts.teacher}, {facts.top_k} of {facts.vocabulary} tokens, in "
            f"{counted(facts.num_shards, 'shard')}"
        )


def say_warnings() -> None:
    """Print what transformers warned of so far, and what of a checkpoint is not used."""
    for text in model_class.notes():
        printing.warn(f"entrenar: warning: {text}")


def say_skipped(skipped: Sequence[BadRow]) -> None:
    """Print how many rows were skipped, and the first of them with the reason."""
    if skipped:
        printing.say(f"skipped: {counted(len(skipped), 'row')} (data.on_error: skip)")
        printing.say_lines("\n".join(samples.listed(skipped)))


def keep_skipped(prepared: Prepared) -> None:
    """List all skipped rows in a file of the output folder; remove that of an earlier run.

    Raises UsageError if it can't be written.
    """
    path, skipped = prepared.settings.output / SKIPPED, _skipped(prepared)
    try:
        if skipped:
            lines = [escaping.exact(one) for one in skipped]
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        problem = f"can't be written ({error.strerror or error}); make room or give access"
        raise UsageError(f"output {path}: {problem}") from error


def _skipped(prepared: Prepared) -> list[BadRow]:
    """Return the rows that were skipped, each once: parts of a file have those of all of it."""
    validation = prepared.validation
    both = (*prepared.train.skipped, *(() if validation is None else validation.skipped))
    return list(dict.fromkeys(both))
