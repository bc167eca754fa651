"""Elastic training with real processes: ranks are killed and frozen by signals, and replaced.

A rank strikes itself at the moment that the scenario names. Its processes are forks of one that has
loaded torch. Supervisors are threads of this process, which run the supervisor's own code. What a
rank did is in a file of its own, line by line, so that nothing is lost when it is killed.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import entrenar_py
from entrenar_py.shared import mutants, trace
from entrenar_py.shared.errors import SystemFailure, UsageError
from entrenar_py.shared.faults import SILENT, Fault
from entrenar_py.shared.patience import Patience
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.untrusted import json_text, printing
from entrenar_py.systems import preload
from entrenar_py.systems.probes.elastic_oracle import Script
from entrenar_py.train.coordinator.recorder import Recorder
from entrenar_py.train.elastic.launcher import seat_of_launcher
from entrenar_py.train.elastic.membership import ConvictedError, Roll
from entrenar_py.train.elastic.supervise import end_with_parent, supervise
from entrenar_py.train.elastic.trainer import ElasticTrainer
from entrenar_py.train.wire_io.processes import Crew, Hand, Job

DEADLINE_S = 8.0  # by default
_PATIENCE_S = 60.0
_POLL_S = 0.005
_OUTPUT_MAX = 300  # characters of a rank's output that a reason quotes


def run(scenario: Scenario) -> trace.Trace:
    """Train as `scenario` says, and record every micro-batch, step and generation of each rank.

    A killed rank gets a new process before the step of its fault `join`, or never. Raises
    SystemFailure if a rank fails, and UsageError for a `join` without a `kill` before it.
    """
    _require_orderly(scenario)
    recorder = Recorder(scenario)
    with tempfile.TemporaryDirectory(prefix="entrenar-") as name:
        folder = Path(name)
        try:
            _Launcher(scenario, folder).run()
        finally:
            crew().gather(0.0)
        for file in sorted(folder.glob("*.jsonl")):  # by rank, then by process
            for event in trace.load_events(file.read_bytes()):
                if not (isinstance(event, trace.Planted) and recorder.of(trace.Planted)):
                    recorder.emit(event)
    return recorder.finish(status="completed")


def _require_orderly(scenario: Scenario) -> None:
    for rank in range(scenario.world_size):
        kinds = [one.kind for one in _faults_of(scenario, rank) if one.kind in ("kill", "join")]
        if kinds != (["kill", "join"] * len(kinds))[: len(kinds)]:
            raise UsageError(
                f"faults {', '.join(kinds)} of rank {rank} on system elastic: let kill and join "
                "take turns, the first one kill"
            )


def _faults_of(scenario: Scenario, rank: int) -> list[Fault]:
    return sorted(
        (one for one in scenario.faults if one.rank == rank), key=lambda one: one.step or 0
    )


@cache
def crew() -> Crew:
    """Return the processes of the ranks; they end with this process."""
    made = Crew(main, preload=preload.of_ranks(), one_job=True)
    atexit.register(made.dismiss)
    return made


# --- the launcher and its supervisors -------------------------------------------------------------


@dataclass(frozen=True)
class _Process:
    """A rank's process, as its supervisor sees it."""

    hand: Hand

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs."""
        return self.hand.process.exitcode

    def kill(self) -> None:
        """Send SIGKILL."""
        self.hand.process.kill()


class _Launcher:
    """The store, and a supervisor for each rank."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self._scenario, self._folder = scenario, folder
        self._lock = threading.Lock()  # of the crew
        # A process of its own, as torch prints a warning when a client of the store is killed.
        keeper = crew().give(json.dumps({"output": str(folder / "store.output.txt")}).encode())
        self._port = (keeper.heard() or b"").decode()
        if not self._port:
            raise SystemFailure("the process of the store ended")
        self._hands: list[tuple[int, Hand]] = []  # with their ranks

    def run(self) -> None:
        """Start all ranks, and return when the training has ended. Raises SystemFailure."""
        ranks = range(self._scenario.world_size)
        with ThreadPoolExecutor(len(ranks)) as threads:
            seats = [threads.submit(self._supervise, rank) for rank in ranks]
            try:
                self._wait(seats)
            finally:
                if not all(one.done() for one in seats):
                    roll = Roll(seat_of_launcher(self._environment(0)).store)
                    roll.store.set("ended", "")  # or supervisors would wait for it
                    with self._lock:
                        for _, hand in self._hands:
                            hand.process.kill()
        for seat in seats:
            seat.result()  # raises what its supervisor did
        for rank, hand in self._hands:
            status = hand.process.exitcode
            if status not in (0, -signal.SIGKILL):
                raise SystemFailure(f"rank {rank} ended with {status}: {self._output(rank)}")

    def _wait(self, seats: Sequence[Future[int]]) -> None:
        patience = Patience(_PATIENCE_S)
        while wait(seats, patience.interval_s).not_done:
            if patience.look():
                raise SystemFailure(f"the ranks did not end within {_PATIENCE_S:g} s")

    def _supervise(self, rank: int) -> int:
        environment = self._environment(rank)
        seat = seat_of_launcher(environment)
        joins = [one for one in _faults_of(self._scenario, rank) if one.kind == "join"]
        num_started = 0

        def start() -> _Process:
            nonlocal num_started
            num_started += 1
            while num_started > 1 and not Roll(seat.store).has(_due(rank, num_started)):
                if Roll(seat.store).has("ended"):  # a step before that join was the last
                    break
                time.sleep(_POLL_S)
            return self._start(rank, num_started, environment)

        return supervise(start(), seat, start=start, max_restarts=len(joins), say=lambda _: None)

    def _start(self, rank: int, process: int, environment: Mapping[str, str]) -> _Process:
        earlier = [_path(self._folder, rank, number) for number in range(1, process)]
        struck = [
            event.fault
            for file in earlier
            if file.exists()
            for event in trace.load_events(file.read_bytes())
            if isinstance(event, trace.Injected)
        ]
        job = {
            "scenario": self._scenario.to_dict(),
            "folder": str(self._folder),
            "output": str(self._folder / f"{rank}.{process}.output.txt"),
            "rank": rank,
            "process": process,
            "faults": [
                fault.to_dict()
                for fault in _faults_of(self._scenario, rank)
                if fault.kind != "join" and fault.to_dict() not in struck
            ],
            "environment": environment,
        }
        with self._lock:
            hand = crew().give(json.dumps(job).encode())
            self._hands.append((rank, hand))
        return _Process(hand)

    def _environment(self, rank: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self._scenario.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": self._port,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    def _output(self, rank: int) -> str:
        files = sorted(self._folder.glob(f"{rank}.*.output.txt"))
        text = "".join(file.read_text(errors="replace") for file in files).strip()
        return text[-_OUTPUT_MAX:] or "it printed nothing"


def _due(rank: int, process: int) -> str:
    """Return the key of the store that says that a process of `rank` may start."""
    return f"system/due/{rank}.{process}"


def _path(folder: Path, rank: int, process: int) -> Path:
    return folder / f"{rank:03}.{process:03}.jsonl"


# --- one rank's process ---------------------------------------------------------------------------


def main(pipe: Connection) -> NoReturn:
    """Keep the store, or train as one process of a rank.

    It ends at once, without shutting torch down: gloo's threads sometimes hang then.
    """
    torch.set_num_threads(1)
    desk = Job(pipe)
    message = desk.next()
    assert message is not None, "a process is started for a job"
    job = json_text.load(message)
    with Path(job["output"]).open("wb") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
    if "scenario" in job:
        status = _train(job)
    else:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        desk.note(str(store.port).encode())
        desk.next()  # never comes
        status = 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _train(job: Mapping[str, Any]) -> int:
    """Train as one process of a rank, and return its exit status."""
    os.environ.update(job["environment"])
    scenario = Scenario.from_dict(job["scenario"])
    with mutants.planted(scenario.mutant) as planting:
        rank = _Rank(scenario, job, planting)
        try:
            rank.train()
        except ConvictedError as error:
            rank.emit(trace.Halt(step=rank.step, rank=job["rank"], reason=str(error)))
        except SystemExit as end:  # the run ended before this process joined
            return end.code if isinstance(end.code, int) else 1
        except BaseException as error:  # noqa: BLE001  (it has no caller)
            printing.warn(f"{type(error).__name__}: {error}")
            return 1
    return 0


class _Rank:
    """One process of a rank: the script, its record, and what strikes it."""

    def __init__(
        self, scenario: Scenario, job: Mapping[str, Any], planting: mutants.Planting
    ) -> None:
        self._scenario, self._planting = scenario, planting
        self._rank, self._process = job["rank"], job["process"]
        self._faults = [Fault(**fields) for fields in job["faults"]]
        path = _path(Path(job["folder"]), self._rank, self._process)
        self._file = path.open("ab", buffering=0)
        self._said_planted = False
        self._progress_s: float | None = None
        self._generation = -1
        self.step, self._shard = 0, 0
        self._last = False  # whether the micro-batch is the last one of the step

    def train(self) -> None:
        """Train until all have committed the last step."""
        torch.use_deterministic_algorithms(True)
        script = Script(self._scenario)
        self._strike_within(script)
        trainer = entrenar_py.elastic(
            script.model,
            script.optimizer,
            micro_batches=self._scenario.num_shards,
            schedulers=[script.schedule],
            state=[script.average],
            seed=self._scenario.seed,
            deadline_s=self._scenario.options.get("deadline_s", DEADLINE_S),
            audit=self._scenario.options.get("audit_share", 0.0),
        )
        for step in trainer.steps(self._scenario.num_steps):
            self._note_generation(script, trainer)
            self.step = step
            self._let_join(step)
            for batch in trainer.fold(script.batches(step)):
                self._shard = trainer.shard
                self._last = trainer.shard == trainer.shards[-1]
                if trainer.shard in trainer.shards:  # not only audited
                    self.emit(script.shard(step, trainer.shard, rank=self._rank))
                script.loss(batch).backward()  # type: ignore[no-untyped-call]
                if self._last:
                    self._strike("Exchange")
            script.clip()
            rate = script.rate
            if trainer.commit():
                script.average.update()
                self.emit(script.update(step, rank=self._rank, learning_rate=rate))
                self._strike("Committed")
        self._note_generation(script, trainer)

    # --- the record -------------------------------------------------------------------------------

    def emit(self, event: trace.Event) -> None:
        """Record an event."""
        events = [event]
        if self._planting.struck and self._scenario.mutant and not self._said_planted:
            self._said_planted = True
            events.insert(0, trace.Planted(name=self._scenario.mutant))
        self._file.write(trace.dump_events(events))
        self._progress_s = time.monotonic()

    def _note_generation(self, script: Script, trainer: ElasticTrainer) -> None:
        """Record the generation, if it is a new one."""
        generation, waited_s = trainer.generation, None
        if generation.number == self._generation:
            return
        self._generation = generation.number
        if self._progress_s is not None:
            waited_s = time.monotonic() - self._progress_s
        self.emit(
            trace.Grouped(
                step=trainer.step,
                rank=self._rank,
                process=self._process,
                generation=generation.number,
                members=tuple(seat for seat, _ in generation.members),
                received=trainer.rank in generation.behind,
                waited_s=waited_s,
                progress={"schedule": script.schedule.last_epoch},
                **script.state(),
            )
        )

    # --- faults -----------------------------------------------------------------------------------

    def _strike_within(self, script: Script) -> None:
        """Let faults strike in the forward pass, the backward pass and the optimizer's step."""

        def at(place: str, *_: object) -> None:
            self._strike(place)

        def before_the_exchange(*_: object) -> None:
            if self._last:
                self._strike("Backward")

        script.model.first.register_forward_hook(partial(at, "Forward"))
        script.optimizer.register_step_post_hook(partial(at, "Stepping"))
        # The last gradient that is made. This hook runs before the trainer's, which sends it.
        first = next(script.model.parameters())
        first.register_post_accumulate_grad_hook(before_the_exchange)  # type: ignore[no-untyped-call]
        for name, parameter in script.model.named_parameters():
            parameter.register_post_accumulate_grad_hook(partial(self._corrupt, name))  # type: ignore[no-untyped-call]

    def _corrupt(self, name: str, parameter: Tensor) -> None:
        """Let a silent fault strike this gradient, of its shard once or of all from a step on."""
        now = {"step": self.step, "rank": self._rank, "shard": self._shard}
        for fault in [one for one in self._faults if one.kind in SILENT]:
            due = fault.shard is None and (fault.step or 0) <= self.step
            once = (fault.step, fault.shard) == (self.step, self._shard)
            if (due or once) and name == (fault.tensor or "first.weight"):
                assert parameter.grad is not None
                parameter.grad.view(-1)[fault.element or 0] = float(fault.value or 0)
                self.emit(trace.Injected(fault=fault.to_dict(), tensor=name, **now))
                if once:
                    self._faults.remove(fault)

    def _strike(self, place: str) -> None:
        """Let a fault of this moment strike this process, by a signal."""
        for fault in self._faults:
            if (fault.at, fault.step) == (place, self.step):
                self._faults.remove(fault)
                self.emit(trace.Injected(fault=fault.to_dict(), step=self.step, rank=self._rank))
                pid, number = os.getpid(), signal.SIGKILL
                if fault.kind == "freeze":
                    thaw, number = f"sleep {fault.seconds}; kill -CONT {pid}", signal.SIGSTOP
                    subprocess.Popen(["sh", "-c", thaw], preexec_fn=end_with_parent)
                os.kill(pid, number)
                return

    def _let_join(self, step: int) -> None:
        """Let processes start that join before `step`, and wait until they ask to be let in."""
        for rank in range(self._scenario.world_size):
            joins = [one for one in _faults_of(self._scenario, rank) if one.kind == "join"]
            for process, join in enumerate(joins, start=2):
                if join.step == step and rank != self._rank:
                    roll = Roll(seat_of_launcher().store)
                    roll.store.set(_due(rank, process), "")
                    self._wait(lambda: _asks(roll, rank, process))  # noqa: B023
        self._progress_s = time.monotonic()

    def _wait(self, done: Callable[[], bool]) -> None:
        end = time.monotonic() + _PATIENCE_S
        while not done():
            if time.monotonic() > end:
                raise SystemFailure("a rank that should join did not ask to be let in")
            time.sleep(_POLL_S)


def _asks(roll: Roll, rank: int, process: int) -> bool:
    """Return whether a process of `rank` waits to be let in, or was let in."""
    if roll.incarnation(rank) < process:
        return False
    number = roll.newest()
    return roll.has(f"joining/{number}") or roll.trains(rank, number)
