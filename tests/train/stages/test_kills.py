"""Stages are killed, frozen and replaced, and the run ends on the undisturbed bits.

`test_doomed` kills each role at each message.
"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

from entrenar_py.train.service import exit_codes
from tests.train.finetune import runs
from tests.train.service.cluster import Cluster, Process
from tests.train.stages.conftest import EPOCHS, Undisturbed
from tests.train.stages.test_machines import configured

UNTIL_S = 60.0


class Run:
    """A coordinator and three stages; one of them can be started again."""

    def __init__(self, machines: Cluster, small: Path, llama: Path, **changes: object) -> None:
        self.machines, self.folder = machines, machines.folder
        section = {
            "listen": machines.address,
            "secret_file": "secret",
            "timing": {"heartbeat_s": 0.5, "dead_after_s": 3.0},
        }
        configured(
            self.folder,
            small,
            llama,
            strategy="layer_pipeline",
            workers=3,
            checkpoint_every=5,
            training={"epochs": EPOCHS},
            coordinator=section,
            **changes,
        )
        self.coordinator = self.coordinate()
        self.workers = {rank: self.work(rank) for rank in range(3)}

    def coordinate(self, *options: str) -> Process:
        return self.machines.coordinator(*options, cache=self.folder / "own")

    def work(self, rank: int | None) -> Process:
        asked = [] if rank is None else ["--rank", str(rank)]
        return self.machines.worker(*asked, cache=self.folder / "theirs")

    def reach(self, step: int) -> None:
        """Wait until so many steps are made."""
        path, end = self.folder / "out" / "metrics.jsonl", time.monotonic() + UNTIL_S
        while time.monotonic() < end:
            if path.exists():
                lines = path.read_text("utf-8").splitlines()
                made = [json.loads(line)["step"] for line in lines if '"what": "step"' in line]
                if max(made, default=-1) >= step:
                    return
            time.sleep(0.01)
        raise AssertionError(f"step {step} was not made: {self.coordinator.text}")

    def end(self) -> bytes:
        """Wait for the end of all; return the adapters."""
        codes = [one.code() for one in (self.coordinator, *self.workers.values())]
        told = "\n".join(one.text for one in (self.coordinator, *self.workers.values()))
        assert codes == [exit_codes.DONE] * len(codes), told
        return runs.adapters(self.folder / "out")


def test_a_spare_takes_the_stage_of_the_dead(
    machines: Cluster, small: Path, llama: Path, undisturbed: Undisturbed
) -> None:
    """A worker that found no free place waits, and takes the first one that is left."""
    run = Run(machines, small, llama)
    run.reach(1)
    spare = run.work(None)
    run.reach(5)
    run.workers[1].kill()
    run.workers[1] = spare
    assert run.end() == undisturbed(EPOCHS)
    assert "loads stage 1: block 2" in spare.text or "loads stage 1: blocks" in spare.text


def test_a_frozen_stage_is_given_up(
    machines: Cluster, small: Path, llama: Path, undisturbed: Undisturbed
) -> None:
    """It is silent for too long; when it goes on, it comes back."""
    run = Run(machines, small, llama)
    run.reach(5)
    run.workers[1].signal(signal.SIGSTOP)
    run.coordinator.until(r"worker 1 left in step \d+: silent")
    run.workers[1].signal(signal.SIGCONT)
    assert run.end() == undisturbed(EPOCHS)


def test_a_run_goes_on_under_another_cut(
    machines: Cluster, small: Path, llama: Path, undisturbed: Undisturbed
) -> None:
    """Three equal stages, then two others; then it is one process's digest."""
    run = Run(machines, small, llama)
    run.reach(7)
    run.coordinator.signal(signal.SIGTERM)
    assert run.coordinator.code() == exit_codes.OF_FINISH["stopped"]
    for worker in run.workers.values():
        worker.code()
    path = run.folder / "run.yaml"
    record = json.loads(path.read_text("utf-8"))
    del record["workers"]
    record["stages"] = [
        {"layers": [0, 3], "worker": ["left"]},
        {"layers": [3, 4], "worker": ["right", "beside"]},
    ]
    path.write_text(json.dumps(record), "utf-8")
    run.coordinator = run.coordinate("--resume")
    run.workers = {
        rank: machines.worker("--id", name, cache=run.folder / "theirs")
        for rank, name in enumerate(("left", "right", "beside"))
    }
    assert run.end() == undisturbed(EPOCHS)
