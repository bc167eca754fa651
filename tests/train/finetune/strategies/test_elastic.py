"""`elastic: true`: ranks that are killed change no bit, and no line of the record."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from entrenar_py import entrenar as cli
from entrenar_py.shared import trace
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.trace import ledger
from entrenar_py.train.finetune import cli as finetune_cli
from entrenar_py.train.finetune.strategies import vector
from entrenar_py.train.finetune.strategies.elastic import Elastic
from entrenar_py.train.service import exit_codes
from tests import extras
from tests.train.finetune.strategies import ranks, runs
from tests.train.finetune.strategies.runs import Case

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
extras.require("peft", "transformers")

BY_HAND = pytest.mark.by_hand
MORE = {"evaluate_every": 2, "checkpoint_every": 2}


@pytest.fixture(scope="module")
def case(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(
        folder=tmp_path_factory.mktemp("elastic"),
        model=small / "model",
        small=small,
        lora={"dropout": 0.2},
        data={"validation": runs.VALIDATION},
        training={"clip_norm": 0.5, "epochs": 3},
        more=MORE,
    )


@pytest.fixture(scope="module")
def undisturbed(case: Case) -> Path:
    """The output of one rank of `ddp_canonical`, without `elastic`."""
    assert ranks.torchrun(case.write("one", "ddp_canonical"), 1)[0] == [exit_codes.DONE]
    return case.folder / "one"


def elastic(case: Case, name: str) -> Path:
    config = case.write(name, "ddp_canonical")
    config.write_text(config.read_text("utf-8") + "elastic: true\n", "utf-8")
    return config


def assert_undisturbed(output: Path, undisturbed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Assert that the output and its record are those of the undisturbed run."""
    assert runs.digest(output) == runs.digest(undisturbed)
    assert [one.step for one in runs.steps(output)] == [*range(6)]
    for here, there in zip(runs.steps(output), runs.steps(undisturbed), strict=True):
        assert (here.loss, here.grad_norm, here.applied_norm) == (
            there.loss,
            there.grad_norm,
            there.applied_norm,
        )
    assert [one["step"] for one in runs.noted(output, "step")] == [*range(6)]
    assert [one["step"] for one in runs.noted(output, "evaluation")] == [2, 4, 6]
    record = ledger.load(output / "ledger.jsonl")
    assert {one.step for one in record.of(trace.Saved)} >= {2, 4, 6}
    assert [one.status for one in record.of(trace.End)] == ["completed"]
    assert (output / "report.html").exists()
    assert cli.main(["ledger", "verify", str(output / "ledger.jsonl")]) == exit_codes.DONE
    assert "twice" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "deaths",
    [
        {1: "train:2"},
        {0: "made:1"},
        {0: "scored:2", 1: "scored:2"},
        pytest.param({0: "page"}, marks=BY_HAND),
        pytest.param({0: "train:1"}, marks=BY_HAND),
        pytest.param({0: "save:2"}, marks=BY_HAND),
        pytest.param({0: "scored:2"}, marks=BY_HAND),
        pytest.param({0: "output"}, marks=BY_HAND),
        pytest.param({0: "made:0", 1: "train:3"}, marks=BY_HAND),
        pytest.param({0: "train:3", 1: "train:3"}, marks=BY_HAND),
        pytest.param({0: "train:1", 1: "train:1"}, marks=BY_HAND),
    ],
    ids=str,
)
def test_deaths_change_nothing(
    case: Case, undisturbed: Path, deaths: dict[int, str], capsys: pytest.CaptureFixture[str]
) -> None:
    name = "out" + "-".join(f"{seat}{at.replace(':', '')}" for seat, at in deaths.items())
    codes, told = ranks.elastically(elastic(case, name), 2, deaths=deaths, waits_before=3)
    ends = {seat: [None, 0] if seat in deaths else [0] for seat in range(2)}
    assert codes == ends, told
    output = case.folder / name
    assert_undisturbed(output, undisturbed, capsys)
    if len(deaths) == 1 and all(
        at[-1] in "012" for at in deaths.values()
    ):  # a newcomer has trained, too
        shards = ledger.load(output / "ledger.jsonl").of(trace.Shard)
        assert {one.rank for one in shards if one.step == 5} == {0, 1}


@pytest.fixture(scope="module")
def spiky(case: Case) -> Path:
    """The output of two elastic ranks that nothing disturbs. Nearly every step has a spike."""
    codes, told = ranks.elastically(elastic(case, "spiky"), 2, spikes=True)
    assert codes == {0: [0], 1: [0]}, told
    return case.folder / "spiky"


def lines(output: Path) -> list[object]:
    """Return what the record says, in order, but for processes and times."""
    record = ledger.load(output / "ledger.jsonl")
    of_processes = (trace.Start, trace.Attempt)
    events = [
        replace(event, rank=0) if isinstance(event, trace.Shard) else event
        for event in record.events
        if not isinstance(event, of_processes)
    ]
    metrics = list[object]()
    for line in (output / "metrics.jsonl").read_text("utf-8").splitlines():
        with suppress(ValueError):  # a part of one stays, and the line follows as a whole
            entry = json.loads(line)
            if entry["what"] != "began":
                metrics.append((entry["what"], entry["step"]))
    return [*events, *metrics]


NUM_WRITES = 40
SHOWN = [(5, 0.7), (38, 0)]  # some shards of step 1; the note of the end


@pytest.mark.parametrize(
    ("number", "share"),
    [
        pytest.param(number, share, marks=() if (number, share) in SHOWN else BY_HAND)
        for number in range(NUM_WRITES)
        for share in (0, 0.7)
    ],
)
def test_a_writer_that_dies_in_a_write_loses_no_line(
    case: Case, spiky: Path, number: int, share: float
) -> None:
    """Its successor writes what is missing, and nothing twice."""
    name = f"write{number}-{share}"
    config = elastic(case, name)
    codes, told = ranks.elastically(config, 2, deaths={0: f"write:{number}:{share}"}, spikes=True)
    assert codes == {0: [None, 0], 1: [0]}, told
    output = case.folder / name
    assert lines(output) == lines(spiky)
    assert runs.digest(output) == runs.digest(spiky)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=BY_HAND) for n in range(1, 30))])
def test_both_ranks_die_in_a_write(case: Case, spiky: Path, seed: int) -> None:
    """The second one as a writer, or not at all. If none is left, the checkpoint is continued."""
    draw, name = random.Random(seed), f"both{seed}"
    deaths = {
        seat: f"write:{draw.randrange(NUM_WRITES // (seat + 1))}:{draw.choice([0, 0.7])}"
        for seat in range(2)
    }
    codes, told = ranks.elastically(elastic(case, name), 2, deaths=deaths, spikes=True)
    assert codes[0] == [None, 0], told
    assert codes[1] in ([0], [None, 0]), told
    assert lines(case.folder / name) == lines(spiky)
    assert runs.digest(case.folder / name) == runs.digest(spiky)


def test_a_writer_that_lags_writes_what_the_others_committed(
    case: Case, undisturbed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It gets the step from another rank, with its numbers, and scores and saves after it."""
    codes, told = ranks.elastically(elastic(case, "lags"), 2, deaths={0: "lags:1"})
    assert codes == {0: [0], 1: [0]}, told
    assert "repeats step 2, since a test" in told
    assert_undisturbed(case.folder / "lags", undisturbed, capsys)


@pytest.fixture(scope="module")
def stopped(case: Case) -> Path:
    """The output of a run that one of its ranks was told to stop."""
    codes, told = ranks.elastically(elastic(case, "stopped"), 2, deaths={1: "stop:2"})
    assert codes == {0: [exit_codes.STOPPED], 1: [exit_codes.STOPPED]}, told
    assert "a rank was stopped by a signal" in told
    return case.folder / "stopped"


def test_a_stopped_run_has_to_be_resumed(stopped: Path) -> None:
    codes, told = ranks.elastically(stopped.with_suffix(".yaml"), 2)
    assert codes == {0: [exit_codes.INVALID], 1: [exit_codes.INVALID]}
    assert told.count("it already exists; continue with --resume") == 2


@pytest.mark.parametrize(
    "death",
    [
        "write:0:0",  # before it says that it goes on: the last line is the end of the stopped run
        *(pytest.param(f"write:{number}:0", marks=BY_HAND) for number in range(1, 13)),
    ],
)
def test_a_stopped_run_is_resumed(case: Case, undisturbed: Path, stopped: Path, death: str) -> None:
    """Ranks of `ddp_canonical` without `elastic` could go on, too."""
    name = "resumed-" + death.replace(":", "-")
    config, output = elastic(case, name), case.folder / name
    shutil.copytree(stopped, output)
    codes, told = ranks.elastically(config, 2, "--resume", deaths={0: death})
    assert codes == {0: [None, 0], 1: [0]}, told
    assert runs.digest(output) == runs.digest(undisturbed)
    record = ledger.load(output / "ledger.jsonl")
    assert [one.step for one in record.of(trace.Update)] == [*range(6)]
    assert [one.step for one in record.of(trace.Saved)] == [2, 4, 6]
    assert [one.status for one in record.of(trace.End)] == ["failed", "completed"]
    is_started = [isinstance(one, trace.Start) for one in record.events]
    assert any(is_started[record.events.index(record.of(trace.End)[0]) :])
    assert [one["step"] for one in runs.noted(output, "step")] == [*range(6)]
    assert [one["step"] for one in runs.noted(output, "evaluation")] == [2, 6]
    assert [one["step"] for one in runs.noted(output, "completed")] == [6]


@pytest.mark.parametrize(
    "death",
    [
        "write:10:0",  # between the halt and the end, which are two lines of the ledger
        *(pytest.param(f"write:{number}:0", marks=BY_HAND) for number in (*range(4, 10), 11)),
        pytest.param("page", marks=BY_HAND),
    ],
)
def test_a_halt_is_one_of_all_ranks(case: Case, death: str) -> None:
    """A rank that dies meanwhile gets to know of it."""
    training = {"learning_rate": 1e30, "weight_decay": 0.0, "schedule": "constant"}
    name = "halted-" + death.replace(":", "-")
    config = elastic(replace(case, method="full", lora={}, training=training), name)
    codes, told = ranks.elastically(config, 2, deaths={0: death})
    assert codes[1] == [exit_codes.WRONG], told
    assert codes[0][0] is None
    record = ledger.load(case.folder / name / "ledger.jsonl")
    assert len(record.of(trace.Halt)) == 1
    assert [one.status for one in record.of(trace.End)] == ["halted"]
    assert len(runs.noted(case.folder / name, "halted")) == 1
    assert (case.folder / name / "report.html").exists()


def test_three_ranks_have_the_same_bits(case: Case, undisturbed: Path) -> None:
    """The tree needs no power of two. Two deaths leave a single rank."""
    deaths = {0: "train:2", 2: "made:1"}
    codes, told = ranks.elastically(elastic(case, "three"), 3, deaths=deaths)
    assert codes == {0: [None, 0], 1: [0], 2: [None, 0]}, told
    assert runs.digest(case.folder / "three") == runs.digest(undisturbed)
    assert [one.step for one in runs.steps(case.folder / "three")] == [*range(6)]


def test_a_rank_that_hangs_is_given_up_by_the_time_of_steps(case: Case, undisturbed: Path) -> None:
    """Not after half an hour, which ranks may need to save, to score or to load a model."""
    config = elastic(replace(case, more={}), "hangs")
    codes, told = ranks.elastically(config, 2, deaths={1: "hangs:3"}, least_s=2.0)
    assert codes == {0: [0], 1: [None, 0]}, told
    assert "repeats step 3, since an exchange between ranks took longer than " in told
    assert runs.digest(case.folder / "hangs") == runs.digest(undisturbed)


@BY_HAND  # on a busy machine, other steps may take longer than the limit
@pytest.mark.parametrize("moment", ["save", "scored", "first"])
def test_a_rank_that_takes_long_is_not_given_up(case: Case, moment: str) -> None:
    """Saving, scoring and a newcomer's first step aren't steps that only compute."""
    more = {"evaluate_every": 3, "checkpoint_every": 3}
    config = elastic(replace(case, more=more), f"slow-{moment}")
    deaths = {1: "train:2"} if moment == "first" else {}
    codes, told = ranks.elastically(
        config, 2, deaths=deaths, waits_before=3, least_s=2.0, slow_at=moment
    )
    assert codes == {0: [0], 1: [None, 0] if deaths else [0]}, told
    assert "took longer than" not in told


def test_a_newcomer_with_another_configuration_is_refused(case: Case, undisturbed: Path) -> None:
    """It would take other steps than the rest, which go on without it."""
    config = elastic(replace(case, more={}), "edited")
    other = config.with_name("other.yaml")
    other.write_text(config.read_text("utf-8").replace("epochs: 3", "epochs: 4"), "utf-8")
    deaths = {1: "train:1"}
    codes, told = ranks.elastically(config, 2, deaths=deaths, waits_before=3, successors=other)
    assert codes == {0: [0], 1: [None, exit_codes.INVALID]}, told
    assert "ranks with different settings may get different bits" in told
    assert runs.digest(case.folder / "edited") == runs.digest(undisturbed)


def test_a_ledger_of_another_run_is_refused_by_all(case: Case, undisturbed: Path) -> None:
    """Nobody continues it in place of a rank that could not begin."""
    config = elastic(case, "left")
    (case.folder / "left").mkdir()
    there = (undisturbed / "ledger.jsonl").read_bytes()
    (case.folder / "left" / "ledger.jsonl").write_bytes(there)
    codes, told = ranks.elastically(config, 2)
    assert codes == {0: [exit_codes.INVALID], 1: [exit_codes.INVALID]}
    assert "ledger.jsonl: it already exists; continue with --resume" in told
    assert (case.folder / "left" / "ledger.jsonl").read_bytes() == there


def test_ranks_of_several_hosts_are_refused(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    problem = "elastic: true with 2 ranks, 1 of them on this host: any rank may have to write"
    assert finetune_cli.rank([str(elastic(case, "hosts"))], place) == exit_codes.INVALID
    assert problem in capsys.readouterr().err


def test_more_weights_than_a_vector_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector, "is_small", lambda *_: False)
    shards: Any = SimpleNamespace(workload=SimpleNamespace(module=torch.nn.Linear(1, 1)))
    with pytest.raises(UsageError, match="elastic: true with more than 256 MiB of trained weights"):
        Elastic(shards, record=Mock(), settings="", is_followed=bool)


@BY_HAND
def test_torchrun_starts_a_rank_in_place_of_a_killed_one(case: Case, tmp_path: Path) -> None:
    """As a user does, in processes of their own."""
    case = replace(case, folder=tmp_path, training={"epochs": 100}, more={}, data={})
    config = elastic(case, "out")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    module = ["-m", "entrenar_py.supervise", "-m", finetune_cli.PROG, str(config)]
    process = subprocess.Popen(
        [sys.executable, *command, *module],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    output = tmp_path / "out"
    while process.poll() is None:
        metrics = output / "metrics.jsonl"
        if metrics.exists() and len(runs.noted(output, "step")) > 20:
            break
        time.sleep(0.1)
    (rank, _) = sorted(one for one in _processes() if _is_rank(one, config))
    os.kill(rank, signal.SIGKILL)
    told, _ = process.communicate(timeout=200)
    assert process.returncode == 0, told
    assert "ended with status -9: starts again, 9 more times" in told
    assert [one.step for one in runs.steps(output)] == [*range(200)]
    assert ranks.torchrun(case.write("one", "ddp_canonical"), 1)[0] == [exit_codes.DONE]
    assert runs.digest(output) == runs.digest(tmp_path / "one")


def _processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def _is_rank(process: int, config: Path) -> bool:
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return False
    return str(config) in words and "entrenar_py.supervise" not in " ".join(words)
