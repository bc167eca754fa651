"""Checks and messages before a run begins: its rows, the rules that it breaks, its memory."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from entrenar_py.shared.config.problems import Problems
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.untrusted import escaping, printing
from entrenar_py.shared.wording import counted
from entrenar_py.train.distill.student import Student
from entrenar_py.train.finetune import settings_file, staffing
from entrenar_py.train.model import hyper_parameters, model_folder, preparation, samples
from entrenar_py.train.model.hyper_parameters import Facts, Rows
from entrenar_py.train.model.preparation import Prepared
from entrenar_py.train.model.rows import BadRow
from entrenar_py.train.model.settings import Settings
from entrenar_py.train.plan import plan
from entrenar_py.train.plan.devices import Device
from entrenar_py.train.plan.shape import Shape

SKIPPED = "skipped.txt"  # in the output folder


def say_rows(prepared: Prepared) -> None:
    """Print the numbers of samples and of cut rows, and the first rows that were skipped.

    Warns about pairs with a prompt that isn't the beginning of both sides, token by token, and
    about conversations with an answer that doesn't follow the generation prompt.
    """
    for what, rows in (("train", prepared.train), ("validation", prepared.validation)):
        if rows is not None:
            printing.say(f"{what}: {counted(len(rows), 'sample')}")
    files = [prepared.train]
    if prepared.validation is not None and prepared.settings.data.validation is not None:
        files.append(prepared.validation)  # else both are parts of one file
    if num_cut := sum(rows.num_cut for rows in files):
        printing.say(f"cut: {counted(num_cut, 'row')} (data.on_long: truncate)")
    say_skipped(prepared.settings, _skipped(prepared))
    number = sum(rows.num_unaligned for rows in files)
    if number and prepared.train.are_pairs:
        printing.warn(
            f"entrenar: warning: in {counted(number, 'pair')}, the prompt alone has different "
            "tokens than with its answers, so a completion begins before the prompt's end; see "
            "that texts of prompts end with a whole word and no space, and that the chat template "
            "begins an answer as it renders one"
        )
    elif number:
        printing.warn(
            f"entrenar: warning: in {counted(number, 'row')}, the chat template doesn't write "
            "before the last answer what it asks for one with (its generation prompt), such as an "
            "open <think>; so the model is trained after a text that it is never asked with: give "
            "those answers a thought, or use a template that begins an answer as it renders one"
        )


def say_teacher(workload: object) -> None:
    """Print which teacher's shards a student learns from; nothing for any other workload.

    The teacher's checkpoint may be missing here, so it is not compared with the shards.
    """
    if isinstance(workload, Student):
        facts = workload.teacher.facts
        printing.say(
            f"teacher: {facts.teacher}, {facts.top_k} of {facts.vocabulary} tokens, in "
            f"{counted(facts.num_shards, 'shard')}"
        )


def say_warnings() -> None:
    """Print the warnings of transformers so far, and which parts of a checkpoint are not used."""
    for text in model_folder.notes():
        printing.warn(f"entrenar: warning: {text}")


def say_skipped(settings: Settings, skipped: Sequence[BadRow]) -> None:
    """Print the number of skipped rows, and the first of them with the reason."""
    if skipped:
        by = samples.skipped_by(settings.data, skipped)
        printing.say(f"skipped: {counted(len(skipped), 'row')} ({by})")
        printing.say_lines("\n".join(samples.listed(skipped)))


def keep_skipped(prepared: Prepared) -> None:
    """List all skipped rows in a file of the output folder, or remove an earlier run's file.

    Raises UsageError if the file can't be written.
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
    """Return the skipped rows without duplicates: both parts of a split file list all of them."""
    validation = prepared.validation
    both = (*prepared.train.skipped, *(() if validation is None else validation.skipped))
    return list(dict.fromkeys(both))


def show_remarks(path: Path, facts: Facts) -> None:
    """Print a warning for each rule that the configuration at `path` breaks.

    Raises ContractError for values with which training is impossible.
    """
    problems = Problems()
    root = settings_file.read(path, problems)
    if root is None:
        problems.settle(strict=True)
        return
    for remark in hyper_parameters.remarks(facts):
        at = settings_file.innermost(root, remark.key.split(".")).at
        report = problems.error if remark.level == "error" else problems.warn
        report(at, f"{remark.message} [{remark.rule}]", rule=remark.rule)
    for problem in problems.settle(strict=False):
        printing.warn(problem.line)


_BANDWIDTH = 1e9  # any value: only memory is checked


def look(path: Path, prepared: Prepared, names: Sequence[str], devices: Sequence[Device]) -> None:
    """Print what is unusual in the configuration at `path`; refuse a run that does not fit.

    Workers compute on the backends `names`, in turns, which have `devices`. If a model's memory
    can't be estimated, a warning says so, and the run is allowed. Raises ContractError for values
    with which training is impossible, and UsageError for a device with too little memory.
    """
    places = list(dict.fromkeys(names))
    _look(path, prepared, devices, "star", turns=[places.index(name) for name in names])


def workers_that_fit(prepared: Prepared, most: int) -> int:
    """Return for how many workers, up to `most`, the CPU has memory; 1 if that is unknown.

    The result is also 1 if not even one worker fits. `look` refuses that run.
    """
    return _fitting(prepared.settings, most, longest=_longest(prepared))


def planned(settings: Settings, devices: Sequence[Device], *, longest: int | None) -> Settings:
    """Return settings with the number of workers that a run would start on this machine's CPU.

    Settings are returned unchanged if they give a number, or if a device is not a CPU. `longest` is
    the number of tokens of the longest row, None if rows were not read.
    """
    if settings.workers is not None or any(one.kind != "cpu" for one in devices):
        return settings
    most = staffing.busy(staffing.num_cores(), settings.training.num_shards)
    return replace(settings, workers=_fitting(settings, most, longest=longest))


def _fitting(settings: Settings, most: int, *, longest: int | None) -> int:
    devices = plan.of_backends(("cpu",), settings.devices)
    run = plan.of(settings, devices, longest=longest, bandwidth=_BANDWIDTH)
    for number in range(most, 1, -1):
        with contextlib.suppress(UsageError):  # raised if its memory can't be estimated
            if plan.has_memory(replace(run, settings=replace(settings, workers=number))):
                return number
    return 1


def look_as_ranks(
    path: Path,
    prepared: Prepared,
    *,
    names: Sequence[str],
    num_ranks: int,
    num_hosts: int,
    free: Sequence[int] = (),
) -> None:
    """Do what `look` does for `num_ranks` torchrun ranks, with the same number on each host.

    Ranks on this host compute on `names` in turns. Other hosts are assumed to have the same
    devices. If `free` is given, each rank has its own GPU, with this many free bytes.
    """
    settings = replace(prepared.settings, workers=num_ranks)
    assert settings.strategy is not None, "ranks of torchrun have one"
    if free and not settings.devices:
        devices = [
            Device(name=names[rank % len(names)], kind="cuda", memory=num_bytes)
            for rank, num_bytes in enumerate(free)
        ]
    else:
        devices = num_hosts * plan.of_backends(names, settings.devices)
    _look(path, replace(prepared, settings=settings), devices, settings.strategy)


def remark(path: Path, prepared: Prepared, shape: Shape | None = None) -> None:
    """Print what is unusual in the configuration at `path`, with a model of `shape`.

    Raises ContractError for values with which training is impossible.
    """
    settings, rows = prepared.settings, hyper_parameters.rows_of(prepared)
    number = (shape or Shape(settings)).num_parameters
    show_remarks(path, Facts(settings=settings, num_parameters=number, rows=rows))


def _look(
    path: Path,
    prepared: Prepared,
    devices: Sequence[Device],
    strategy: str,
    turns: Sequence[int] = (),
) -> None:
    run = plan.of(
        prepared.settings,
        devices,
        longest=_longest(prepared),
        bandwidth=_BANDWIDTH,
        turns=turns,
    )
    remark(path, prepared, run.shape)
    if any(device.kind == "cuda" for device in devices):
        told = preparation.compilation(prepared.settings, len(prepared.train))
        printing.say(f"blocks are compiled: {told}")
    try:
        plan.rehearse(run, strategy)
    except UsageError as error:
        printing.warn(f"{plan.RULE} is not checked: {error}")
        return
    plan.require_memory(run, strategy)


def rows_and_longest(settings: Settings) -> tuple[Rows | None, int | None]:
    """Return facts about the rows, and the tokens of the longest; None for both if unreadable.

    Needs no weights. Raises UsageError for a model that doesn't exist.
    """
    model_folder.require_config(settings.model)
    try:
        prepared = preparation.prepare(settings, needs_weights=False)
    except UsageError as error:
        first = str(error).splitlines()[0]
        printing.warn(f"rows are not checked, but assumed to be data.max_tokens long: {first}")
        return None, None
    return hyper_parameters.rows_of(prepared), _longest(prepared)


def _longest(prepared: Prepared) -> int:
    return prepared.train.longest
