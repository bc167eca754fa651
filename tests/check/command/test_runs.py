"""Runs of a command, side by side where they don't disturb each other."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import pytest

from entrenar_py.check.command import runs
from entrenar_py.check.command.launch import Ended
from entrenar_py.check.command.run_plan import Plan
from entrenar_py.check.command.run_settings import RunSettings
from entrenar_py.check.observing import RATES
from entrenar_py.check.rank_files.layout import Layout
from entrenar_py.shared import process
from entrenar_py.shared.faults import COMMON, REPLAYED, Fault
from entrenar_py.shared.trace import Update
from tests import traces

FIRST = RunSettings(world_size=2, seed=0)
SECOND, THIRD = (replace(FIRST, repeat=number) for number in (1, 2))


def plan(folder: Path, launch: Callable[..., Ended], *options: str) -> Plan:
    """Return the plan of a command whose runs have copies of an empty folder."""
    source = folder / "source"
    source.mkdir()
    return Plan(
        command=("torchrun", *options, "{world_size}"),
        needs=(),
        folder=folder / "runs",
        source=source,
        launch=launch,
    )


def ended(folder: Path, *, is_forked: bool = True, seconds: float = 1.0) -> Ended:
    output = folder / "output.txt"
    return Ended(code=0, seconds=seconds, tail=(), output=output, num_left=0, is_forked=is_forked)


def test_a_run_is_beside_the_next_one_but_the_first(tmp_path: Path) -> None:
    """The first run is alone; the second waits for the third to begin, and it does."""
    names, both = list[str](), Barrier(2)

    def launch(command: Any, *, folder: Path, **settings: object) -> Ended:
        names.append(folder.name)
        if folder.name != "first":
            both.wait(30.0)
        return ended(folder)

    with runs._Ahead(plan(tmp_path, launch, "--standalone")) as ahead:
        ahead.launched("first", FIRST, {"second": SECOND, "third": THIRD}, {})
        assert names == ["first"]
        ahead.launched("second", SECOND, {"third": THIRD}, {})
        ahead.launched("third", THIRD, {}, {})
    assert sorted(names) == ["first", "second", "third"]


LEAVES = Fault(kind="leave", step=1, rank=1)
POISONED = Fault(kind="non_finite_gradient", step=1, rank=1, value="nan")


@pytest.mark.parametrize(
    ("words", "fault", "store"),
    [
        ((), LEAVES, "1"),
        ((), POISONED, "1"),
        ((), Fault(kind=COMMON, step=0), None),
        (("-m", "entrenar_py.supervise"), LEAVES, None),
    ],
)
def test_ranks_that_torchrun_starts_again_get_a_new_store(
    tmp_path: Path, words: tuple[str, ...], fault: Fault, store: str | None
) -> None:
    """Only in runs in which ranks end early; supervised ranks keep torchrun's store."""
    given = list[str | None]()

    def launch(command: Any, *, folder: Path, variables: dict[str, str], **_: object) -> Ended:
        given.append(variables.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE"))
        return ended(folder)

    with runs._Ahead(plan(tmp_path, launch, *words)) as ahead:
        ahead.launched("2-workers-killed", replace(FIRST, faults=(fault,)), {}, {})
    assert given == [store]


def test_a_run_waits_for_the_batches_that_it_is_given(tmp_path: Path) -> None:
    """It reads them as it begins, so it isn't begun beside the run that keeps them."""
    names = list[str]()

    def launch(command: Any, *, folder: Path, **settings: object) -> Ended:
        names.append(folder.name)
        return ended(folder)

    common = Fault(kind=COMMON, step=0)
    keeping = replace(FIRST, faults=(common,))
    alone = RunSettings(world_size=1, seed=0)
    given = replace(alone, faults=(common, Fault(kind=REPLAYED, step=0, value="2")))
    later = {"1-worker-common": given}
    with runs._Ahead(plan(tmp_path, launch, "--standalone")) as ahead:
        ahead.launched("2-workers", FIRST, {}, {})
        ahead.launched("2-workers-common", keeping, later, {})
        assert names == ["2-workers", "2-workers-common"]
        ahead.launched("1-worker-common", given, {}, {})
    assert names[-1] == "1-worker-common"


@pytest.mark.parametrize(
    ("options", "how"),
    [((), {}), (("--standalone",), {"is_forked": False}), (("--standalone",), {"seconds": 60.0})],
)
def test_runs_that_may_disturb_each_other(
    options: tuple[str, ...], how: dict[str, Any], tmp_path: Path
) -> None:
    """With a fixed port, with imports in each run, and if they are long, runs are one by one."""
    names = list[str]()

    def launch(command: Any, *, folder: Path, **settings: object) -> Ended:
        names.append(folder.name)
        return ended(folder, **how)

    with runs._Ahead(plan(tmp_path, launch, *options)) as ahead:
        ahead.launched("first", FIRST, {"second": SECOND, "third": THIRD}, {})
        ahead.launched("second", SECOND, {"third": THIRD}, {})
        assert names == ["first", "second"]


def test_a_run_that_is_not_wanted_any_more_is_called_off(tmp_path: Path) -> None:
    """What runs ahead when the harness is interrupted is ended."""
    begun = Event()

    def launch(command: Any, *, folder: Path, is_called_off: Any, **settings: object) -> Ended:
        if folder.name == "second":
            begun.wait(30.0)
            raise KeyboardInterrupt
        if folder.name == "third":
            begun.set()
            while not is_called_off():
                time.sleep(0.01)
        return ended(folder)

    ahead = runs._Ahead(plan(tmp_path, launch, "--standalone"))
    ahead.launched("first", FIRST, {"second": SECOND, "third": THIRD}, {})
    with pytest.raises(KeyboardInterrupt), ahead:
        ahead.launched("second", SECOND, {"third": THIRD}, {})


def test_an_interrupt_ends_a_run_and_the_one_begun_ahead(tmp_path: Path) -> None:
    """Even if the latter notices it first; afterwards it is forgotten, and runs can be judged."""
    noticed = Event()

    def launch(command: Any, *, folder: Path, **settings: object) -> Ended:
        if folder.name == "second":
            noticed.wait(30.0)
        if folder.name != "first":
            noticed.set()
            process.check_interrupts()
        return ended(folder)

    ahead = runs._Ahead(plan(tmp_path, launch, "--standalone"))
    ahead.launched("first", FIRST, {"second": SECOND, "third": THIRD}, {})
    with process.deferred_interrupts():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), ahead:
            ahead.launched("second", SECOND, {"third": THIRD}, {})
        process.check_interrupts()


@pytest.mark.parametrize(
    ("axes", "changes", "names"),
    [
        ({"dp_replicate": 1, "dp_shard": 2}, {}, ["4-workers"]),
        ({"dp_shard": 2, "tp": 1}, {}, []),
        (None, {}, []),
        ({"dp_replicate": 1, "dp_shard": 2}, {"world_sizes": (2, 3)}, []),
        ({"dp_replicate": 1, "dp_shard": 2}, {"command": ("t", "{world_size}", "{share:6}")}, []),
    ],
)
def test_four_workers_are_tried_where_data_are_split_along_two_axes(
    axes: dict[str, int] | None, changes: dict[str, Any], names: list[str]
) -> None:
    """On two workers one axis has a single rank. A batch of six can't be cut in four."""
    folder = Path("runs")
    plan = Plan(**{"command": ("t", "{world_size}"), "needs": (), "folder": folder, **changes})
    assert [*plan.wider(None if axes is None else Layout(axes=axes))] == names


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", ["mirrored_ranks", "repeated_share"])
def test_runs_with_one_share_step_with_the_rates_of_several_workers(
    tmp_path: Path, world_size: int, kind: str
) -> None:
    """A schedule that follows a score would part there, as these runs have other weights."""
    several = traces.run(traces.scenario(world_size=2))
    fault = Fault(kind=kind, step=0, value="2")
    file = runs._rates(
        RunSettings(world_size=world_size, seed=0, faults=(fault,)), tmp_path, several
    )
    steps = {str(update.step) for update in several.of(Update)}
    assert set(json.loads(Path(file[RATES]).read_text("utf-8"))) == steps
    assert runs._rates(RunSettings(world_size=world_size, seed=0), tmp_path, several) == {}


def test_the_trace_of_a_shared_run_is_known_as_ours_by_a_later_call(tmp_path: Path) -> None:
    """The run was launched for another contract, so its output is in that contract's folder."""
    own = replace(plan(tmp_path, ended), made={FIRST: traces.failed(traces.scenario())})
    (file,) = [file for file, _ in runs.record(own, lambda settings, num_left: None)]
    assert file.exists()
    assert "another contract" in (own.folder / "2-workers/output.txt").read_text()
    runs.forget(own.folder)
    assert not file.exists()


def test_accelerate_starts_one_worker_without_its_option_for_several(tmp_path: Path) -> None:
    """It refuses `--multi_gpu --num_processes=1`."""
    commands = []

    def launch(command: Any, *, folder: Path, **settings: object) -> Ended:
        commands.append(" ".join(command))
        return ended(folder)

    words = "accelerate launch --multi_gpu --num_processes={world_size} train.py --multi_gpu"
    own = replace(plan(tmp_path, launch), command=tuple(words.split()))
    for size in (1, 2):
        settings = RunSettings(world_size=size, seed=0)
        runs._launched(own, settings, tmp_path / f"{size}", None, lambda: False)
    assert commands == [
        "accelerate launch --num_processes=1 train.py --multi_gpu",
        "accelerate launch --multi_gpu --num_processes=2 train.py --multi_gpu",
    ]
