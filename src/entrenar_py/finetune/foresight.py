"""Looks at a run before it begins: unusual hyper-parameters, and memory that does not suffice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from entrenar_py.errors import UsageError
from entrenar_py.finetune import remarks
from entrenar_py.planning import plan, room
from entrenar_py.planning.plan import Run
from entrenar_py.tuning import fitting, hyper_parameters
from entrenar_py.tuning.hyper_parameters import Facts, Rows
from entrenar_py.tuning.prepared import Prepared
from entrenar_py.tuning.settings import Settings
from entrenar_py.untrusted import printing

_BANDWIDTH = 1e9  # is not looked at


def look(path: Path, prepared: Prepared, names: Sequence[str]) -> None:
    """Print what is unusual in the configuration at `path`; refuse a run that does not fit.

    Workers compute on the backends `names`, in turns. A model whose memory can't be foreseen is
    said to be so, and runs. Raises ContractError for values that can't train anything, and
    UsageError for a device with too little memory.
    """
    _look(remark(path, prepared, names), "star")


def look_as_ranks(path: Path, prepared: Prepared, *, names: Sequence[str], num_ranks: int) -> None:
    """Do what `look` does for the ranks of torchrun, `num_ranks` of them on `names` in turns."""
    settings = replace(prepared.settings, workers=num_ranks)
    assert settings.strategy is not None, "ranks of torchrun have one"
    _look(remark(path, replace(prepared, settings=settings), names), settings.strategy)


def remark(path: Path, prepared: Prepared, names: Sequence[str]) -> Run:
    """Print what is unusual in the configuration at `path`; return the plan of its run.

    Raises ContractError for values that can't train anything.
    """
    settings = prepared.settings
    devices = room.of_backends(names, settings.devices)
    rows = hyper_parameters.rows_of(prepared)
    run = plan.of(settings, devices, longest=_longest(prepared), bandwidth=_BANDWIDTH)
    number = run.shape.num_parameters
    remarks.show(path, Facts(settings=settings, num_parameters=number, rows=rows))
    return run


def _look(run: Run, strategy: str) -> None:
    try:
        plan.rehearse(run, strategy)
    except UsageError as error:
        printing.warn(f"{room.RULE} is not looked at: {error}")
        return
    room.require(run, strategy)


def rows_and_longest(settings: Settings) -> tuple[Rows | None, int | None]:
    """Return what rules look at in the rows, and the longest; None for rows that can't be read.

    Needs no weights. Raises UsageError for a model that is not there.
    """
    from entrenar_py.tuning import prepared as preparing

    fitting.require_config(settings.model)
    try:
        prepared = preparing.prepare(settings, needs_weights=False)
    except UsageError as error:
        first = str(error).splitlines()[0]
        printing.warn(f"rows are not looked at, and taken for data.max_tokens long: {first}")
        return None, None
    return hyper_parameters.rows_of(prepared), _longest(prepared)


def _longest(prepared: Prepared) -> int:
    return max(prepared.train.length(index) for index in range(len(prepared.train)))
