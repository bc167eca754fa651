"""The coordinator's command in this process: refusals before anything runs, and a whole run."""

from __future__ import annotations

import errno
import signal
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

from entrenar_py import entrenar as cli
from entrenar_py.shared.errors import SystemFailure
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import End, Event
from entrenar_py.shared.trace.writer import Writer
from entrenar_py.train.arithmetic import checkpoint
from entrenar_py.train.finetune import own_models
from entrenar_py.train.service import coordinator, exit_codes, signals
from entrenar_py.train.service.coordinator import Ended, Task
from tests.train.service.cluster import TRAINING, Cluster, cluster, weights

STATE = {"path": "state", "every_steps": 5}


@pytest.fixture
def star(tmp_path: Path) -> Iterator[Cluster]:
    """Yield a cluster, and restore torch's threads and the signal handlers afterwards."""
    before = torch.get_num_threads()
    handlers = {number: signal.getsignal(number) for number in signals.NUMBERS}
    with cluster(tmp_path) as made:
        yield made
    torch.set_num_threads(before)
    for number, handler in handlers.items():  # a run that is over ignores them for good
        signal.signal(number, handler)


def refusal(star: Cluster, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """Return the one line that an invalid command prints."""
    assert cli.main(["coordinator", str(star.folder / "run.yaml"), *options]) == exit_codes.INVALID
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def test_an_old_checkpoint_is_not_overwritten(
    star: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """An existing checkpoint without --resume is refused, and nothing is changed."""
    star.configure(checkpoint=STATE)
    (star.folder / "state").write_bytes(b"precious")
    assert "it already exists; continue with --resume" in refusal(star, capsys)
    assert (star.folder / "state").read_bytes() == b"precious"


def test_nothing_to_resume(star: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    """A run without checkpoints can't be resumed."""
    star.configure()
    assert "the configuration has no checkpoint to continue from" in refusal(
        star, capsys, "--resume"
    )


def test_a_checkpoint_of_another_run(star: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    """Another run's checkpoint is refused by the differing field, a damaged one by its digest."""
    star.configure(checkpoint=STATE)
    other = Scenario(system="parameter_server", **{**TRAINING, "optimizer": "adamw"})
    progress = {"step": 1, "scenario": other.to_dict()}
    checkpoint.save(star.folder / "state", {}, progress)
    said = refusal(star, capsys, "--resume")
    assert "saved by a run with optimizer='adamw', but this run has optimizer='momentum'" in said
    (star.folder / "state").write_bytes(b"nonsense")
    assert "first line is not a checkpoint's" in refusal(star, capsys, "--resume")


def test_a_port_that_is_taken(star: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    """The message quotes the operating system's, and no new ledger is left behind."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        at = f"127.0.0.1:{taken.getsockname()[1]}"
        star.address = at
        star.configure(ledger="ledger.jsonl")
        assert f"listen={at}: can't listen there (Address already in use)" in refusal(star, capsys)
    assert not (star.folder / "ledger.jsonl").exists()


def test_a_place_that_is_none(star: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    """A bad path of ledger or metrics is reported before any worker is awaited."""
    star.configure(ledger="absent/ledger.jsonl")
    assert "can't be written (No such file or directory)" in refusal(star, capsys)
    star.configure(metrics="absent/metrics.jsonl")
    assert "can't be written (No such file or directory)" in refusal(star, capsys)


def test_a_run_and_its_end(star: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    """A run completes, and is still complete when it is resumed.

    One whose last word fails, such as an export, is not said to be completed.
    """
    path = star.configure(checkpoint=STATE, ledger="ledger.jsonl", metrics="metrics.jsonl")
    worker = star.worker()
    done = f"step 12, weights {weights(TRAINING)}"
    assert cli.main(["coordinator", str(path)]) == exit_codes.DONE
    assert capsys.readouterr().out.splitlines()[-1] == f"completed: {done}"
    assert worker.code() == exit_codes.DONE
    assert cli.main(["coordinator", str(path), "--resume"]) == exit_codes.DONE
    again = capsys.readouterr().out.splitlines()[-1]
    assert again == f"completed (it was complete already): {done}"

    def fails(tensors: object, tell: object) -> None:
        raise SystemFailure("the export is not what was trained")

    with pytest.raises(SystemFailure, match="the export is not what was trained"):
        coordinator.serve(own_models.load(path), Task(complete=fails), resume=True)
    assert "completed" not in capsys.readouterr().out


def test_a_disk_that_is_full_at_the_end(star: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger without its last line is reported, and the run's other records are completed."""
    append = Writer.append
    ended: list[Ended] = []

    def fails_at_end(self: Writer, events: Iterable[Event]) -> None:
        events = list(events)
        if any(isinstance(one, End) for one in events):
            raise OSError(errno.ENOSPC, "No space left on device")
        append(self, events)

    monkeypatch.setattr(Writer, "append", fails_at_end)
    path = star.configure(ledger="ledger.jsonl")
    worker = star.worker()
    task = Task(ended=ended.append)
    with pytest.raises(SystemFailure, match=r"ledger\.jsonl can't be written \(No space left"):
        coordinator.serve(own_models.load(path), task, resume=False)
    assert worker.code() == exit_codes.DONE
    assert [one.finish.status for one in ended] == ["completed"]


def test_nobody_comes(star: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    """Without workers the run ends after `gather_s`, its state is saved, and it can be resumed."""
    timing = {"heartbeat_s": 0.01, "dead_after_s": 1.0, "gather_s": 0.05}
    path = star.configure(checkpoint=STATE, timing=timing)
    assert cli.main(["coordinator", str(path)]) == exit_codes.WRONG
    said = capsys.readouterr().out.splitlines()[-1]
    assert "s for workers; present are []): step 0, weights " in said
    assert checkpoint.load(star.folder / "state")[1]["step"] == 0


def test_a_worker_in_this_process(star: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    """A worker prints its backend, the start of its part, and the end of the run."""
    star.configure()
    coordinator = star.coordinator()
    coordinator.until("listens at")
    given = ["--coordinator", star.address, "--secret-file", str(star.secret)]
    assert cli.main(["worker", *given]) == exit_codes.DONE
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("worker: backend cpu: ")
    assert said[1:] == ["worker: takes part as rank 0, from step 0 on", "worker: completed"]
    assert coordinator.code() == exit_codes.DONE
