"""The adapters have the bytes of one undisturbed worker, whoever takes part and whichever dies."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from entrenar_py import entrenar as cli
from entrenar_py import trace
from entrenar_py.shared.trace import ledger
from entrenar_py.train.finetune import staffing
from entrenar_py.train.service import exit_codes, measures
from tests.train.finetune import runs
from tests.train.service.cluster import Process

# peft asks for what a later transformers will lack.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

EPOCHS = 6  # 30 steps, so that a process that is killed after the first dies before the last
STEPS = 12  # of the runs with options
LONG = {"training": {"epochs": EPOCHS}, "checkpoint_every": 3}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep tokenised rows out of the user's own cache."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(
    scope="module",
    params=[
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.cuda,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
            ],
        ),
    ],
)
def options(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The options that choose the backend of all workers; on one GPU they share it."""
    return "--backend", request.param


@pytest.fixture(scope="module")
def alone(
    options: tuple[str, ...], cache: None, small: Path, tmp_path_factory: pytest.TempPathFactory
) -> bytes:
    """The adapters of a run of EPOCHS on one worker."""
    folder = tmp_path_factory.mktemp("alone")
    config = runs.configured(folder, small, **LONG)
    assert cli.main(["finetune", str(config), *options]) == exit_codes.DONE
    return runs.adapters(folder / "out")


@pytest.mark.parametrize(
    "workers", [2, *(pytest.param(number, marks=pytest.mark.by_hand) for number in (3, 4))]
)
def test_any_number_of_workers(
    workers: int,
    options: tuple[str, ...],
    alone: bytes,
    small: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two are not named: without a number all cores are used, and that is said."""
    monkeypatch.setattr(staffing, "num_cores", lambda: 2)
    is_default = workers == 2 and "cpu" in options
    named = None if is_default else workers
    config = runs.configured(tmp_path, small, workers=named, **LONG)
    assert cli.main(["finetune", str(config), *options]) == exit_codes.DONE
    taking_part = {tuple(step["workers"]) for step in runs.told(tmp_path / "out", "step")}
    assert taking_part == {tuple(range(workers))}
    assert runs.adapters(tmp_path / "out") == alone
    said = f"{workers} workers with one thread each, on 2 cores\n"
    assert (said in capsys.readouterr().out) == ("cpu" in options)


def test_a_worker_that_is_killed(
    options: tuple[str, ...], alone: bytes, small: Path, tmp_path: Path
) -> None:
    """It leaves in the middle, and the other one computes its shards."""
    config, over = runs.configured(tmp_path, small, workers=2, **LONG), threading.Event()
    killer = threading.Thread(target=_kill_a_worker, args=(tmp_path / "out", over))
    killer.start()
    try:
        assert cli.main(["finetune", str(config), *options]) == exit_codes.DONE
    finally:
        over.set()
        killer.join()
    (left,) = runs.told(tmp_path / "out", "left")
    assert 0 <= left["step"] < 5 * EPOCHS - 1
    assert runs.adapters(tmp_path / "out") == alone


OPTIONS: dict[str, dict[str, Any]] = {
    "all linear layers, rsLoRA, what is kept": {
        "lora": {"targets": ["all-linear"], "rslora": True},
        "keep": {"best": True, "last": 2},
        "evaluate_every": 4,
    },
    "DoRA, layers trained whole, rows cut": {
        "lora": {"dora": True, "modules_to_save": ["embed_tokens", "model.norm"]},
        "data": {"max_tokens": 8, "on_long": "truncate"},
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, options: tuple[str, ...], small: Path, tmp_path: Path) -> None:
    """One worker, and three of which one is killed, end after `max_steps` with the same bytes."""
    outputs = dict[int, Path]()
    for workers in (1, 3):
        folder = tmp_path / str(workers)
        folder.mkdir()
        changes = {"training": {"epochs": EPOCHS, "max_steps": STEPS}, **OPTIONS[name]}
        config, over = runs.configured(folder, small, workers=workers, **changes), threading.Event()
        outputs[workers] = folder / "out"
        killer = threading.Thread(target=_kill_a_worker, args=(outputs[workers], over))
        if workers > 1:
            killer.start()
        try:
            assert cli.main(["finetune", str(config), *options]) == exit_codes.DONE
        finally:
            over.set()
        if workers > 1:
            killer.join()
    assert len(runs.told(outputs[3], "left")) == 1
    for output in outputs.values():
        steps = {line["step"] for line in runs.told(output, "step")}
        assert len(steps) == STEPS
    one, three = (
        {path.relative_to(output): path.read_bytes() for path in output.rglob("adapter_model.*")}
        for output in outputs.values()
    )
    assert one == three


def _kill_a_worker(output: Path, over: threading.Event) -> None:
    """Kill a worker of the run in this process once a step is made, unless the run is over."""
    metrics = output / "metrics.jsonl"
    while not over.wait(0.001):
        if metrics.exists() and "step_ms" in metrics.read_text(encoding="utf-8"):
            multiprocessing.active_children()[0].kill()
            return


@pytest.mark.parametrize("more", [False, True], ids=["as before", "more workers"])
def test_a_coordinator_that_is_killed(
    more: bool,
    options: tuple[str, ...],
    alone: bytes,
    small: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`--resume` goes on from the last checkpoint, also where there are other cores by then.

    Or with another number of workers, if the configuration says so.
    """
    named = 1 if more else None if "cpu" in options else 2
    config = runs.configured(tmp_path, small, workers=named, **LONG)
    monkeypatch.setattr(staffing, "num_cores", lambda: 16)
    process = Process(["finetune", config, *options])
    try:
        process.until("checkpoint before step")
    finally:
        process.kill()
    if more:
        runs.configured(tmp_path, small, workers=2, **LONG)
    assert cli.main(["finetune", str(config), *options, "--resume"]) == exit_codes.DONE
    first = int(capsys.readouterr().out.partition("from step ")[2].partition(" ")[0])
    assert 0 < first < 5 * EPOCHS
    assert runs.adapters(tmp_path / "out") == alone
    if more:
        ranks = {
            shard.rank for shard in ledger.load(tmp_path / "out" / "ledger.jsonl").of(trace.Shard)
        }
        assert 1 in ranks


def test_a_halt_at_a_spike(
    options: tuple[str, ...],
    alone: bytes,
    small: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The run ends before the step, and `--resume` without the option makes it."""
    config = runs.configured(tmp_path, small, workers=2, **LONG)
    with monkeypatch.context() as patched:
        patched.setattr(measures, "FACTOR", 1.0)  # some norm is above the median
        code = cli.main(["finetune", str(config), *options, "--halt-on-spike"])
    assert code == exit_codes.WRONG
    assert "training halted before any update (--halt-on-spike)" in capsys.readouterr().out
    assert not (tmp_path / "out" / "run.json").exists()
    assert cli.main(["finetune", str(config), *options, "--resume"]) == exit_codes.DONE
    first = int(capsys.readouterr().out.partition("from step ")[2].partition(" ")[0])
    assert measures.STEPS_LEAST <= first < 5 * EPOCHS
    assert runs.adapters(tmp_path / "out") == alone
