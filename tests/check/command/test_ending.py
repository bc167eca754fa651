"""The end of a run of a command, from its exit code, its output and the ranks' files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from entrenar_py.check.command import folders, run_trace
from entrenar_py.check.command.launch import Ended
from entrenar_py.check.command.run_settings import RunSettings, Turn
from entrenar_py.check.rank_files import notes
from entrenar_py.check.rank_files.rank_file import STACK_SUFFIX, RankTrace
from entrenar_py.shared.trace import End, Event, Injected, Shard, Trace, Update
from tests import traces

NAN = {"kind": "non_finite_gradient", "step": 1, "rank": 1, "value": "nan"}
LEAVE = {"kind": "leave", "step": 1, "rank": 1}


def rank(number: int, *, ended: bool = True, problem: str = "", world_size: int = 2) -> RankTrace:
    """Return the record of a rank; its events are given separately."""
    header = {"rank": number, "world_size": world_size}
    return RankTrace(life=0, header=header, events=(), ended=ended, problem=problem)


def steps(*made: int) -> list[Update]:
    """Return the updates of ranks 0, 1, ... that made these numbers of steps."""
    return [
        traces.update(step, number, loss=None)
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
        (0, [], [], ["a: no JSON"], "failed", "the records of its ranks are damaged: a: no JSON"),
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
    (tmp_path / notes.ASKED).touch()
    (tmp_path / notes.LOADED).touch()
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


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("accelerate launch --num_processes={world_size} t.py", "use torchrun --nproc_per_node={"),
        ("accelerate launch t.py {world_size}", "put {world_size} into the command"),
        ("./train.sh {world_size}", "put {world_size} into the command"),
    ],
)
def test_a_launcher_that_starts_one_worker(command: str, words: str, tmp_path: Path) -> None:
    """accelerate does so on a machine without two GPUs, whatever the command says."""
    ended = Ended(code=0, seconds=1.0, tail=(), output=tmp_path / "o.txt", num_left=0)
    settings = RunSettings(world_size=2, seed=0)
    alone = [rank(0, world_size=1)]
    _, reason = run_trace.ending(alone, steps(2), settings, ended, [], command=command.split())
    assert words in reason


@pytest.mark.parametrize(
    ("made", "quiet_s", "may_be_slow"),
    [((), 300.0, True), ((0, 0), 299.0, True), ((5, 4), 40.0, True), ((5, 4), 100.0, False)],
    ids=["nothing has begun", "no step", "it makes steps", "it hangs"],
)
def test_a_run_that_may_only_be_slow(
    made: tuple[int, ...], quiet_s: float, may_be_slow: bool, tmp_path: Path
) -> None:
    """Its last step is no longer ago than its steps take: it needs another deadline."""
    ended = Ended(
        code=None,
        seconds=300.0,
        tail=(),
        output=tmp_path / "o.txt",
        num_left=0,
        quiet_s=quiet_s,
    )
    ranks = CUT if made else []
    settings = RunSettings(world_size=2, seed=0)
    _, reason = run_trace.ending(ranks, steps(*made), settings, ended, [])
    assert ("give it more time: --deadline S" in reason) is may_be_slow


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
        (0, "", "train.py:31", "read a checkpoint (train.py:31), and ended without taking a"),
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
    ("lives", "code", "printed", "interrupted", "status"),
    [
        (2, 1, "OSError: port", False, "failed"),
        (3, 1, "OSError: port", False, "completed"),  # as the process group was taken down
        (2, 1, LOADING, True, "completed"),  # `unresumed` says so
        (2, 1, LOADING, False, "failed"),
        (2, None, LOADING, False, "failed"),
        (3, None, "", False, "completed"),  # as the process group was taken down
    ],
)
def test_a_last_launch_that_recorded_nothing(
    lives: int, code: int | None, printed: str, interrupted: bool, status: str, tmp_path: Path
) -> None:
    """What ranks have recorded is of the launches before it, and is not the whole run."""
    output = tmp_path / "output.txt"
    output.write_text(printed)
    ended = Ended(code=code, seconds=9, output=output, tail=(printed,), num_left=0)
    ranks = [replace(one, life=life) for life in range(lives) for one in BOTH]
    settings = RunSettings(world_size=2, seed=0, stops=(1, 2), interrupted=interrupted)
    got, why = run_trace.ending(ranks, steps(2, 2), settings, ended, [])
    assert got == status
    words = printed.splitlines()[-1] if printed else "none"
    assert (f"after the stop before step 2: {ended.how}: {words}" in why) is (status == "failed")


def passes(*made: int) -> list[Shard]:
    """Return the backward passes of ranks 0, 1, ... that made so many."""
    return [
        traces.shard(step, number, loss_sum=0.0)
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


CAUGHT = """Error executing job with overrides: []
Traceback (most recent call last):
  File "/home/me/train.py", line 31, in main
ValueError: no such sample
"""
BY_TORCHRUN = """{}
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : {} (pid: 1234)
"""
OWN = RunSettings(world_size=2, seed=0)
TURNED = replace(OWN, turn=Turn("clip", "0.25"))


def other_run(num_steps: int) -> Trace:
    """Return a run on two workers that took these steps."""
    return Trace(
        scenario=traces.scenario(world_size=2),
        environment={},
        promises=(),
        events=(*steps(num_steps, num_steps), End(status="completed")),
    )


@pytest.mark.parametrize(
    ("printed", "code", "settings", "num_steps", "status"),
    [
        ("no such sample", 1, OWN, 3, "failed"),  # it caught its error, and the other run took 3
        ("no such sample", -6, OWN, 3, "failed"),
        ("no such sample", 1, replace(OWN, repeat=1), 2, "completed"),
        (CAUGHT, 1, OWN, 2, "completed"),  # it had taken all steps
        (CAUGHT, 1, OWN, None, "failed"),
        (CAUGHT, 1, TURNED, 2, "failed"),  # nobody knows how many steps it should take
        ("accuracy 0.5", 1, OWN, None, "completed"),  # sys.exit(main()) with any result
        ("accuracy 0.5", 1, TURNED, 3, "completed"),
        (CAUGHT, 134, OWN, None, "completed"),  # a warning, and then gloo aborted the shutdown
        (BY_TORCHRUN.format(CAUGHT, -6), 1, OWN, None, "completed"),
        (BY_TORCHRUN.format(CAUGHT, 1), 1, OWN, None, "failed"),
        ("terminate called without an active exception", -6, OWN, None, "completed"),
        (CAUGHT.replace("no such sample", "Connection reset by peer"), 1, OWN, None, "completed"),
    ],
)
def test_a_script_that_ends_itself_with_an_error(
    printed: str,
    code: int,
    settings: RunSettings,
    num_steps: int | None,
    status: str,
    tmp_path: Path,
) -> None:
    """All its ranks took two steps, and each record ends as if training had ended."""
    output = tmp_path / "output.txt"
    output.write_text(printed)
    ended = Ended(code=code, seconds=9, output=output, tail=(printed,), num_left=0)
    like = None if num_steps is None else other_run(num_steps)
    got, why = run_trace.ending(BOTH, steps(2, 2), settings, ended, [], like)
    assert (got, "no such sample" in why) == (status, status == "failed")
    ours = [replace(one, is_limited=True) for one in BOTH]
    assert run_trace.ending(ours, steps(2, 2), settings, ended, [], like)[0] == "completed"
