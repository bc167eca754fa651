"""The module for torchrun starts a rank again that was killed, and ends with the run's status."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from entrenar_py.train.elastic import launcher
from entrenar_py.train.elastic.launcher import Seat
from entrenar_py.train.elastic.supervise import main, supervise

SCRIPT = """
import hashlib, os, pathlib, signal
import torch
import entrenar_py

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
torch.manual_seed(0)
layer = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
trainer = entrenar_py.elastic(layer, optimizer, micro_batches=4, deadline_s=20)
killed = pathlib.Path(__file__).with_name("killed")
for step in trainer.steps(6):
    if step == 2 and os.environ.get("RANK") == "1" and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    draws = torch.Generator().manual_seed(step)
    for batch in trainer.fold(list(torch.randn(4, 5, 3, generator=draws))):
        layer(batch).square().mean().backward()
    trainer.commit()
if trainer.rank == 0:
    print("digest", hashlib.sha256(layer.weight.detach().numpy().tobytes()).hexdigest())
"""


def test_a_rank_is_killed_under_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other one goes on, and the digest is that of one process without a launcher: this one."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    ranks = subprocess.run(
        [sys.executable, *torchrun, "-m", "entrenar_py.supervise", str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (tmp_path / "killed").exists()
    assert ranks.returncode == 0, ranks.stderr
    assert "rank 1 ended with status -9: starts again, 9 more times" in ranks.stderr
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    try:
        runpy.run_path(str(script))
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
    alone = capsys.readouterr().out
    assert alone.startswith("digest")
    assert alone in ranks.stdout


class Ended:
    """A process that has ended with `status`."""

    def __init__(self, status: int) -> None:
        self._status = status

    def poll(self) -> int:
        return self._status

    def kill(self) -> None:
        raise AssertionError("it has ended")


@pytest.mark.parametrize(("status", "starts"), [(0, 0), (2, 0), (3, 2), (-9, 2)])
def test_a_script_that_is_used_wrongly_is_not_started_again(status: int, starts: int) -> None:
    """Its status is the launcher's. After other errors it is started until no restart is left."""
    started: list[Ended] = []

    def start() -> Ended:
        started.append(Ended(status))
        return started[-1]

    seat = Seat(HashStore(), 0, 1)
    told: list[str] = []
    code = supervise(Ended(status), seat, start=start, max_restarts=2, say=told.append)
    assert len(started) == starts
    assert code == (status if status in (0, 2) else 1)


def test_a_newcomer_that_is_used_wrongly_does_not_end_the_run() -> None:
    """Its seat stays empty, as the others go on: here until nobody is left."""
    store, told = HashStore(), list[str]()
    generation = {"members": [[1, 1]], "source": 0, "behind": [], "lead": 0, "dispute": ""}
    store.set("record/0", json.dumps(generation))
    store.set("gone/1", "")
    seat, newcomer = Seat(store, 0, 2), Ended(2)
    code = supervise(newcomer, seat, start=lambda: newcomer, max_restarts=2, say=told.append)
    assert code == 1
    assert "does not start again: the others go on without it" in told[0]


def test_a_rank_may_end_after_a_signal_at_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor is still importing torch, and would be the rank's end with its own."""
    script = tmp_path / "train.py"
    script.write_text("import pathlib, time; time.sleep(0.3); pathlib.Path('saved').touch()")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher, "seat_of_launcher", lambda: sys.exit(143))
    with pytest.raises(SystemExit):
        main([str(script)])
    assert Path("saved").exists()


@pytest.mark.parametrize("ignored", [False, True])
def test_the_launchers_signals_are_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ignored: bool
) -> None:
    """Those that torchrun sends to its ranks, but for one that is ignored, as under nohup."""
    script, handled = tmp_path / "train.py", list[int]()
    script.touch()
    now = signal.SIG_IGN if ignored else signal.SIG_DFL
    monkeypatch.setattr(signal, "getsignal", lambda _: now)
    monkeypatch.setattr(signal, "signal", lambda number, _: handled.append(number))
    assert main([str(script)]) == 0
    usual = {signal.SIGTERM, signal.SIGINT, signal.SIGQUIT}
    assert {*handled} == (usual if ignored else usual | {signal.SIGHUP})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py"], "nowhere.py: no such file"),
        (["--max-restarts", "-1", __file__], "--max-restarts -1: must be 0 or more"),
        ([], "the following arguments are required: script"),
    ],
)
def test_a_wrong_command_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 2, before anything is started."""
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err
