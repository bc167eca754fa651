"""The trace of a command's run: what its ranks recorded, how it ended, and by which error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from entrenar_py.check.command import folders, run_trace, runs
from entrenar_py.check.command.launch import OUTPUT, Ended
from entrenar_py.check.command.run_plan import Plan
from entrenar_py.check.command.run_settings import RunSettings, Turn
from entrenar_py.check.command.run_trace import Beginnings, first_step
from entrenar_py.check.evidence.needs import ALONE
from entrenar_py.check.rank_files import auto_notes
from entrenar_py.check.rank_files.rank_file import STACK_SUFFIX, RankFile
from entrenar_py.check.rank_files.rank_trace import RankTrace
from entrenar_py.shared import trace
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import (
    End,
    Event,
    Injected,
    Shard,
    Start,
    Tensors,
    Trace,
    Traits,
    Update,
    record_tensor,
)

SCENARIO = Scenario(
    system="command",
    workload="own",
    world_size=1,
    seed=0,
    num_shards=1,
    num_samples=2,
    batch_size=2,
    num_steps=2,
)


def weights(value: float) -> Tensors:
    return {"w": trace.record_tensor(np.array([value], np.float32), values=True)}


def run(values: Sequence[float], step: int = 0) -> Trace:
    """Return a run that begins with the first of `values` and reaches the others."""
    updates = [
        Update(
            step=step + number,
            rank=0,
            loss=None,
            weight=1.0,
            finite=True,
            learning_rate=0.1,
            weights=weights(value),
        )
        for number, value in enumerate(values[1:])
    ]
    return Trace(
        scenario=SCENARIO,
        environment={},
        promises=(),
        events=(
            Start(step=step, rank=0, weights=weights(values[0])),
            *updates,
            End(status="completed"),
        ),
    )


def test_a_run_that_begins_where_another_was_has_failed() -> None:
    """Its reason names the other run, and the step after which it had these weights."""
    beginnings = Beginnings()
    assert beginnings.seen("first", run([1, 2, 3])).end.status == "completed"
    found = beginnings.seen("second", run([2, 4, 5])).end
    assert found.status == "failed"
    assert "the weights that first had after step 0" in found.reason


def test_runs_that_begin_alike_are_left_alone() -> None:
    """Also where the weights never move, or come back to what they were."""
    for values in ([1, 2, 3], [1, 1, 1], [1, 2, 1]):
        beginnings = Beginnings()
        for name in ("first", "second"):
            assert beginnings.seen(name, run(values)).end.status == "completed"


def test_the_first_step_of_a_run_that_found_a_checkpoint() -> None:
    """A script that resumes says so by observe(step=...)."""
    assert first_step(run([1, 2], step=5)) == 5
    assert first_step(run([1, 2])) == 0


WHOLE = np.random.default_rng(1).standard_normal((4, 3)).astype(np.float32)


def launch(command: Sequence[str], *, folder: Path, **settings: object) -> Ended:
    """Write the files of ranks that hold the rows of one matrix, and the end of the run."""
    world_size = int(command[-1])
    for rank in range(world_size):
        file = RankFile(folder, {"rank": rank, "world_size": world_size, "values": True})
        rows = WHOLE[rank * 4 // world_size :][: 4 // world_size]
        weights = {"weight": record_tensor(rows.reshape(-1), values=True)}
        shard = trace.Shard(
            step=0, epoch=0, rank=rank, shard=0, ids=(3, 4), loss_sum=1.0, weight=2, finite=True
        )
        start = Start(step=0, rank=rank, weights=weights, shapes={"weight": rows.shape})
        update = Update(
            step=0,
            rank=rank,
            loss=0.5,
            weight=2,
            learning_rate=0.1,
            gradient=weights,
            grad_norm=None,
            applied_norm=None,
            finite=True,
            weights=weights,
        )
        file.append([start, shard, update])
        file.close()
    (folder / OUTPUT).touch()
    return Ended(code=0, seconds=1.0, tail=(), output=folder / OUTPUT, num_left=0)


def sizes(recorded: trace.Trace) -> list[int | None]:
    """Return how many elements of the matrix each rank is seen with after the step."""
    return [update.weights["weight"].size for update in recorded.of(Update)]


def test_a_run_is_read_again_with_the_pieces_that_one_worker_shows(tmp_path: Path) -> None:
    """The first trace has halves; then whole tensors and one batch, in its file, too."""
    plan = Plan(
        command=("train", "{world_size}"), needs=(ALONE,), folder=tmp_path / "runs", launch=launch
    )
    seen = [(file.stem, run) for file, run in runs.record(plan, lambda _: None)]
    names = [name for name, _ in seen]
    assert names == ["2-workers", "2-workers", "1-worker"]
    traces: Mapping[int, trace.Trace] = {place: run.trace for place, (_, run) in enumerate(seen)}
    assert [sizes(traces[place]) for place in range(3)] == [[6, 6], [12, 12], [12]]
    assert seen[2][1].settings in seen[1][1].ahead, "it is not judged before one worker has run"
    assert [traces[place].scenario.batch_size for place in range(3)] == [4, 2, 2]
    assert sizes(trace.load(tmp_path / "runs/2-workers.jsonl")) == [12, 12]


SCRIPT = """Traceback (most recent call last):
  File "train.py", line 1, in <module>
    import nosuchmodule
    ^^^^^^^^^^^^^^^^^^^
ModuleNotFoundError: No module named 'nosuchmodule'
"""
TORCHRUN = """E1122 18:49:26 api.py:1015] failed (exitcode: 1) local_rank: 0 (pid: 1)
Traceback (most recent call last):
  File "torchrun", line 7, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
====
Root Cause (first observed failure):
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
"""
PEER = """Traceback (most recent call last):
  File "/home/me/train.py", line 9, in step
    loss.backward()
  File "/venv/lib/python3.11/site-packages/torch/_tensor.py", line 630, in backward
RuntimeError: [../gloo/pair.cc] Connection closed by peer
"""
ACCELERATE = """Traceback (most recent call last):
  File "launch.py", line 1423, in <module>
subprocess.CalledProcessError: Command '['python', 'train.py']' returned exit status 1.
"""


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (SCRIPT + TORCHRUN, "ModuleNotFoundError: No module named 'nosuchmodule' (train.py:1)"),
        (SCRIPT + PEER + TORCHRUN, "No module named 'nosuchmodule' (train.py:1)"),
        (PEER + TORCHRUN, "RuntimeError: [../gloo/pair.cc] Connection closed by peer (train.py:9)"),
        (SCRIPT + ACCELERATE, "ModuleNotFoundError: No module named 'nosuchmodule'"),
        (SCRIPT.replace("\n", "\n[rank1]: ") + TORCHRUN, "ModuleNotFoundError: No module named"),
        (SCRIPT + "During handling of this\n" + SCRIPT.replace("such", "thing"), "nothingmodule"),
        ("Traceback (most recent call last):\n  File\nKeyboardInterrupt\n", "KeyboardInterrupt"),
        (TORCHRUN, ""),
        ("step 1\nError: loss: nan\n", ""),
        ("", ""),
    ],
)
def test_the_error_of_the_script(tmp_path: Path, text: str, error: str) -> None:
    """The last error that is not a launcher's is reported, or none if there is no other."""
    path = tmp_path / "output.txt"
    path.write_text(text)
    found = run_trace.script_error(path)
    assert error in found
    assert bool(found) == bool(error)
    assert run_trace.script_error(tmp_path / "none") == ""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("usage: train.py\ntrain.py: error: no --dir\n" + TORCHRUN, "train.py: error: no --dir"),
        ("[rank1]: out of data\n" + TORCHRUN + "left\n", "out of data"),
        (SCRIPT + ACCELERATE, "ModuleNotFoundError: No module named 'nosuchmodule'"),
        (TORCHRUN, ""),
        ("----\n", ""),
    ],
)
def test_the_last_line_of_the_script(tmp_path: Path, text: str, line: str) -> None:
    """What a script printed last is reported, not what its launcher adds."""
    path = tmp_path / "output.txt"
    path.write_text(text)
    assert run_trace.last_printed(path, []) == line
    assert run_trace.last_printed(tmp_path / "none", text.splitlines()) == line or "[rank" in text


@pytest.mark.parametrize(
    ("frame", "loads"),
    [
        ('/site-packages/torch/serialization.py", line 1530, in load', True),
        ('/site-packages/torch/nn/modules/module.py", line 26, in load_state_dict', True),
        ('/site-packages/torch/distributed/checkpoint/state_dict_loader.py", line 5, in run', True),
        ('/site-packages/torch/serialization.py", line 980, in save', False),
    ],
)
def test_an_error_of_loading_a_checkpoint(tmp_path: Path, frame: str, loads: bool) -> None:
    """The frames of the traceback tell, and other ranks' errors don't count."""
    path = tmp_path / "output.txt"
    text = SCRIPT.replace("    import", f'  File "{frame}\n    import')
    path.write_text(text + PEER + TORCHRUN)
    assert run_trace.of_loading(path) == (run_trace.script_error(path) if loads else "")


NAN = {"kind": "non_finite_gradient", "step": 1, "rank": 1, "value": "nan"}
LEAVE = {"kind": "leave", "step": 1, "rank": 1}


def rank(number: int, *, ended: bool = True, problem: str = "", world_size: int = 2) -> RankTrace:
    """Return the record of a rank; its events are given separately."""
    header = {"rank": number, "world_size": world_size}
    return RankTrace(life=0, header=header, events=(), ended=ended, problem=problem)


def steps(*made: int) -> list[Update]:
    """Return the updates of ranks 0, 1, ... that made these numbers of steps."""
    return [
        Update(
            step=step,
            rank=number,
            loss=None,
            weight=1.0,
            learning_rate=0.1,
            finite=True,
            weights={},
        )
        for number, num_steps in enumerate(made)
        for step in range(num_steps)
    ]


def injected(fault: dict[str, object]) -> list[Event]:
    """Return the record of a fault that struck."""
    return [Injected(fault=fault, step=1, rank=1)]


BOTH = [rank(0), rank(1)]
FAILED = [rank(0), rank(1, problem="ValueError: no")]
CUT = [rank(0), rank(1, ended=False)]
AGAIN = [*CUT, *(replace(one, life=1, ended=False) for one in CUT)]


@pytest.mark.parametrize(
    ("code", "ranks", "events", "problems", "status", "reason"),
    [
        (0, BOTH, steps(2, 2), [], "completed", ""),
        (1, BOTH, steps(2, 2), [], "completed", ""),  # taking the process group down failed
        (1, CUT, steps(2, 2), [], "completed", ""),
        (1, CUT, steps(2, 1), [], "failed", "exit code 1: last"),
        (None, BOTH, steps(2, 2), [], "completed", ""),
        (None, CUT, steps(2, 1), [], "failed", "steps made: rank 0 2, rank 1 1"),
        (1, FAILED, steps(2, 2), [], "failed", "exit code 1: ValueError: no"),
        (1, FAILED, [*steps(1, 1), *injected(NAN)], [], "halted", "exit code 1: ValueError: no"),
        (0, BOTH, [*steps(2, 2), *injected(NAN)], [], "completed", ""),
        (
            1,
            CUT,
            [*steps(2, 1), *injected(LEAVE)],
            [],
            "failed",
            "the launcher restarted no worker",
        ),
        (
            1,
            AGAIN,
            [*steps(2, 1), *injected(LEAVE)],
            [],
            "failed",
            "after the restart of workers: exit code 1",
        ),
        (0, [], [], [], "failed", "nothing was recorded: add `obs = entrenar_py.observe("),
        (1, [], [], [], "failed", "the script that trains calls `obs = entrenar_py.observe("),
        (0, [], [], ["a: no JSON"], "failed", "what its ranks recorded is damaged: a: no JSON"),
        (0, BOTH, steps(2, 2), ["a: no JSON"], "failed", "a: no JSON"),
        (0, [rank(0, world_size=1)], steps(2), [], "failed", "for 2 workers and ran with 1"),
        (0, [rank(0, world_size=1)] * 2, steps(2), [], "failed", "2 processes ran as rank 0: if"),
    ],
)
def test_how_it_ended(
    code: int | None,
    ranks: list[RankTrace],
    events: list[Event],
    problems: list[str],
    status: str,
    reason: str,
    tmp_path: Path,
) -> None:
    """The ranks' files override the exit code, and a reason says what to do."""
    ended = Ended(
        code=code, seconds=1.0, tail=("last", "----"), output=tmp_path / "o.txt", num_left=0
    )
    found = run_trace.ending(ranks, events, RunSettings(world_size=2, seed=0), ended, problems)
    assert found[0] == status
    assert reason in found[1]
    assert bool(reason) == bool(found[1])


def test_an_error_comes_before_what_is_not_seen(tmp_path: Path) -> None:
    """A script without a line that fails before it trains is told its own error, not our limits."""
    (tmp_path / auto_notes.ASKED).touch()
    (tmp_path / auto_notes.LOADED).touch()
    output = tmp_path / "o.txt"
    output.write_text("Traceback (most recent call last):\n  x\nValueError: an even number\n")
    settings = RunSettings(world_size=1, seed=0)
    ended = Ended(code=1, seconds=1.0, tail=("x",), output=output, num_left=0)
    reason = run_trace.ending([], [], settings, ended, [])[1]
    assert reason.startswith("nothing was recorded before it failed: exit code 1: ValueError: an")
    output.write_text("")
    ended = Ended(code=0, seconds=1.0, tail=(), output=output, num_left=0)
    assert (
        "no process stepped a torch optimizer" in run_trace.ending([], [], settings, ended, [])[1]
    )


def test_a_folder_that_was_removed(tmp_path: Path) -> None:
    """If the folder was removed, nothing is known of the ranks, whatever the exit code."""
    output = tmp_path / "gone" / "output.txt"
    ended = Ended(code=0, seconds=1.0, tail=(), output=output, num_left=0)
    status, reason = run_trace.ending([], [], RunSettings(world_size=2, seed=0), ended, [])
    assert status == "failed"
    assert reason.endswith("was removed while it ran; exit code 0: it printed nothing")


def test_a_hanging_rank_stands_in_the_users_own_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run has a copy of the script, which is cleared: its place is told as in the script."""
    mine = tmp_path / "mine"
    mine.mkdir()
    monkeypatch.chdir(mine)
    folder = tmp_path / "runs"
    copied = folder.joinpath(folders.FOLDER, *mine.parts[1:], "train.py")
    copied.parent.mkdir(parents=True)
    stack = f'Thread 0x1 (most recent call first):\n  File "{copied}", line 7 in <module>\n'
    (folder / f"00000-000{STACK_SUFFIX}").write_text(stack)
    ended = Ended(code=None, seconds=9, output=folder / "output.txt", tail=(), num_left=0)
    _, reason = run_trace.ending(CUT, steps(2, 1), RunSettings(world_size=2, seed=0), ended, [])
    assert "rank 0 in no collective (train.py:7)" in reason


def test_an_error_names_the_users_own_file(tmp_path: Path) -> None:
    """A path below the run's copy of the user's folder is told without what is in front of it."""
    line = f"FileNotFoundError: no such file: '{tmp_path / folders.FOLDER}/home/me/data.bin'"
    output = tmp_path / "output.txt"
    output.write_text(line)
    ended = Ended(code=1, seconds=9, output=output, tail=(), num_left=0)
    _, reason = run_trace.ending(CUT, steps(2, 1), RunSettings(world_size=2, seed=0), ended, [])
    assert "FileNotFoundError: no such file: '/home/me/data.bin'" in reason


LOADING = """Traceback (most recent call last):
  File "/home/me/train.py", line 31, in <module>
  File "/site-packages/torch/serialization.py", line 1530, in load
UnpicklingError: Weights only load failed
"""


@pytest.mark.parametrize(
    ("code", "printed", "read", "words"),
    [
        (1, LOADING, "", "stop before step 5 the script fails to load its checkpoint: Unpickling"),
        (1, LOADING.replace("load\n", "save\n"), "", ""),
        (0, "", "train.py:31", "read a checkpoint (train.py:31), and ended by itself without a"),
        (0, "", "", ""),
    ],
)
def test_a_run_that_was_not_resumed(
    code: int, printed: str, read: str, words: str, tmp_path: Path
) -> None:
    """A run that is stopped from inside has to go on; one that was told {steps} may be over."""
    output = tmp_path / "output.txt"
    output.write_text(printed)
    ended = Ended(code=code, seconds=9, output=output, tail=(), num_left=0)
    settings = RunSettings(world_size=2, seed=0, stops=(5, 6), interrupted=True)
    found = run_trace.unresumed(BOTH, settings, ended, read)
    assert words in found
    assert bool(words) == bool(found)
    again = [*BOTH, *(replace(one, life=life) for one in BOTH for life in (1, 2))]
    assert not run_trace.unresumed(again, settings, ended, read)
    assert not run_trace.unresumed(BOTH, replace(settings, interrupted=False), ended, read)


@pytest.mark.parametrize(
    ("lives", "printed", "status"),
    [
        (2, "OSError: port", "failed"),
        (3, "OSError: port", "completed"),  # as the process group was taken down
        (2, LOADING, "completed"),  # `unresumed` says so
    ],
)
def test_a_last_launch_that_recorded_nothing(
    lives: int, printed: str, status: str, tmp_path: Path
) -> None:
    """What ranks have recorded is of the launches before it, and is not the whole run."""
    output = tmp_path / "output.txt"
    output.write_text(printed)
    ended = Ended(code=1, seconds=9, output=output, tail=(printed,), num_left=0)
    ranks = [replace(one, life=life) for life in range(lives) for one in BOTH]
    settings = RunSettings(world_size=2, seed=0, stops=(1, 2))
    got, why = run_trace.ending(ranks, steps(2, 2), settings, ended, [])
    assert got == status
    assert ("after the stop before step 2: exit code 1" in why) is (status == "failed")


def passes(*made: int) -> list[Shard]:
    """Return the backward passes of ranks 0, 1, ... that made so many."""
    return [
        Shard(
            step=step, epoch=0, rank=number, shard=0, ids=(), loss_sum=0.0, weight=1.0, finite=True
        )
        for number, num_passes in enumerate(made)
        for step in range(num_passes)
    ]


@pytest.mark.parametrize(
    ("made", "status"),
    [((3, 3), "completed"), ((3, 2), "failed"), ((3, 6), "failed")],
    ids=["a batch is skipped", "a batch is lacking", "more are added up"],
)
def test_a_rank_that_skips_a_batch_alone(
    made: tuple[int, int], status: str, tmp_path: Path
) -> None:
    """It is a step behind as another rank is ended, with all its passes: the run can be judged."""
    ranks = [replace(rank(0), is_limited=True), rank(1, ended=False)]
    output = tmp_path / "output.txt"
    output.write_text("Connection closed by peer\n")
    ended = Ended(code=1, seconds=1.0, tail=("last",), output=output, num_left=0)
    settings = RunSettings(world_size=2, seed=0)
    events = [*passes(*made), *steps(3, 2)]
    assert run_trace.ending(ranks, events, settings, ended, [])[0] == status


def joined(problem: str) -> tuple[list[RankTrace], list[Shard | Update]]:
    """Return ranks and events of a run whose rank 1 has two batches, and waits for rank 0's."""
    ranks = [replace(rank(0), is_limited=True), rank(1, problem=problem)]
    return ranks, [*passes(4, 2), *steps(4, 2)]


@pytest.mark.parametrize(
    ("problem", "status"),
    [("RuntimeError: Connection closed by peer", "completed"), ("ValueError: no", "failed")],
    ids=["it waits", "it fails"],
)
def test_a_rank_that_waits_for_those_with_more_batches(
    problem: str, status: str, tmp_path: Path
) -> None:
    """Where these are ended (`Join`), it loses its peers, which is no error of the script."""
    output = tmp_path / "output.txt"
    output.write_text(f"{problem}\n")
    ended = Ended(code=1, seconds=1.0, tail=("last",), output=output, num_left=0)
    ranks, events = joined(problem)
    assert (
        run_trace.ending(ranks, events, RunSettings(world_size=2, seed=0), ended, [])[0] == status
    )


def test_steps_that_all_ranks_made_are_those_before_one_has_no_batch() -> None:
    """Later numbers may mean other steps: of four steps and two, two are left."""
    ranks, events = joined("Connection closed by peer")
    assert run_trace.by_all(ranks, events) == [*passes(2, 2), *steps(2, 2)]


def test_ranks_that_are_in_unlike_epochs_make_other_steps() -> None:
    """Rank 1 begins its second epoch in step 1, where rank 0 is in its first."""
    ranks, events = joined("Connection closed by peer")
    second = [
        replace(event, epoch=1) if isinstance(event, Shard) and event.rank and event.step else event
        for event in events
    ]
    assert run_trace.by_all(ranks, second) == [*passes(1, 1), *steps(1, 1)]


@pytest.mark.parametrize(
    ("declared", "told", "kept"),
    [(1.0, "", None), (1e9, "", 1e9), (0.25, "0.25", 0.25), (1.0, "0.25", None), (None, "", None)],
)
def test_a_declared_norm_that_a_knob_replaces(
    declared: float | None, told: str, kept: float | None
) -> None:
    """A script that was told its clipping norm is judged by that, not by another it declares."""
    settings = RunSettings(world_size=2, seed=0, turn=Turn("clip", told) if told else None)
    traits = run_trace._as_told_to_clip(Traits(clipping="other", clip_norm=declared), settings)
    assert traits.clip_norm == kept
    assert traits.clipping == ("other" if told else "told")
