"""Trains a small model elastically on forked ranks, of which some are killed, frozen and replaced.

`python -m tests.train.elastic.runs RUNS [SEED]` makes runs of 1 to 4 ranks with random faults, and
exits with 1 unless every run ends with the digest of an undisturbed one. `... runs planned [NAME
...]` makes the runs of `test_elastic.py`, and prints what came of them as JSON. With
ELASTIC_DEVICE=cuda each rank trains on a GPU of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

# Loaded before the fork, as the first optimizer of every rank would load it after that.
import torch._dynamo.aot_compile
from torch import Tensor, nn
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

import entrenar_py
from entrenar_py.train.elastic.exchange import Sum, Wait
from entrenar_py.train.elastic.launcher import seat_of_launcher
from entrenar_py.train.elastic.membership import FINISHED, Roll
from entrenar_py.train.elastic.supervise import end_with_parent, supervise

Report = Callable[[str], None]

ON_GPUS = os.environ.get("ELASTIC_DEVICE") == "cuda"
MICRO_BATCHES, STEPS = 8, 12
DEADLINE_S = 1.5  # of random runs, in which many ranks freeze
PATIENT_S, FREEZE_S = 10.0, 4.0  # of planned ones: a busy machine may be slow
ROOM = 6  # last steps: a newcomer takes part two or three after it has asked, and may die
PAUSE_S = 0.002  # of each micro-batch: a fault finds the run still going


class Fork:
    """A process forked from this one, which runs `target` and exits."""

    def __init__(self, target: Callable[[], int]) -> None:
        self.pid = os.fork()
        self._status: int | None = None
        if not self.pid:
            end_with_parent()
            status = 1
            try:
                status = target()
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else 1
            except BaseException as error:  # noqa: BLE001  # the fork has no caller
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def kill(self) -> None:
        """Send SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)


def device() -> torch.device:
    """Return where this process trains."""
    return (
        torch.device("cuda", int(os.environ.get("RANK", "0"))) if ON_GPUS else torch.device("cpu")
    )


def model() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Return a model, its optimizer and its schedule.

    The model has dropout, weights of two dtypes, and a buffer with gaps in memory.
    """
    torch.manual_seed(0)
    if ON_GPUS:
        torch.cuda.set_device(device())

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.dropout = nn.Linear(5, 37), nn.Dropout(0.1)
            self.second = nn.Linear(37, 3, dtype=torch.bfloat16)
            self.turn: Tensor
            self.register_buffer("turn", torch.randn(5, 8)[:, :5].t())

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x @ self.turn).tanh()
            out: Tensor = self.second(self.dropout(hidden).bfloat16())
            return out

    layers = Mixed().to(device())
    # It has a float32 number for each weight of any dtype, which AdamW has not.
    optimizer = torch.optim.NAdam(layers.parameters(), lr=0.01)
    return layers, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


def batches(step: int) -> Tensor:
    """Return the micro-batches of a step, [MICRO_BATCHES, samples, features]."""
    draws = torch.Generator().manual_seed(step)
    return torch.randn(MICRO_BATCHES, 4, 5, generator=draws).to(device())


def prepare(layers: nn.Module) -> None:
    """Clip the gradients, if all are there, and add noise, which is the same on all ranks."""
    gradients = [one.grad for one in layers.parameters() if one.grad is not None]
    if len(gradients) == len([*layers.parameters()]):
        nn.utils.clip_grad_norm_(layers.parameters(), 1.0)
        for gradient in gradients:
            gradient.add_(torch.randn_like(gradient), alpha=1e-3)


def digest(layers: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any) -> str:
    """Return a digest of everything that a run ends with."""
    tensors = [*layers.state_dict().values()]
    for state in optimizer.state_dict()["state"].values():
        tensors += [one for one in state.values() if isinstance(one, Tensor)]
    parts = [one.detach().float().cpu().numpy().tobytes() for one in tensors]
    return hashlib.sha256(b"".join(parts) + repr(schedule.get_last_lr()).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Death:
    """The `incarnation`-th process at `seat` ends, or freezes, at a moment of `step`.

    `moment` is one of `MOMENTS`. Without a `step` it is the process's first one.
    """

    seat: int
    step: int | None
    moment: str
    number: signal.Signals = signal.SIGKILL
    incarnation: int = 1

    def __call__(self, step: int, moment: str) -> None:
        """Send this process the signal if it is the time."""
        process = (int(os.environ["RANK"]), int(os.environ["INCARNATION"]))
        is_there = self.step in (step, None) and moment == self.moment
        if is_there and process == (self.seat, self.incarnation):
            os.kill(os.getpid(), self.number)


def train(
    report: Report,
    passes: Callable[[int, str], None] = lambda step, moment: None,
    *,
    waits: bool = False,
    leaves_at: int = STEPS,
    deadline_s: float = DEADLINE_S,
) -> int:
    """Train as one rank of the environment, and report the digest in the end.

    `passes` is told the moments of each step. With `waits`, the last `ROOM` steps are not
    made before all seats are taken, by a newcomer if need be. The loop is left before step
    `leaves_at`.
    """
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    layers, optimizer, schedule = model()
    trainer = entrenar_py.elastic(
        layers,
        optimizer,
        micro_batches=MICRO_BATCHES,
        schedulers=[schedule],
        deadline_s=deadline_s,
    )
    gather = Sum.gather

    def passing(started: Sum, wait: Wait) -> None:
        passes(trainer.step, "exchange")
        gather(started, wait)

    Sum.gather = passing  # type: ignore[assignment, method-assign]
    first = next(layers.parameters())
    first.register_hook(lambda _: passes(trainer.step, "backward"))  # type: ignore[no-untyped-call]
    optimizer.register_step_pre_hook(lambda *_: passes(trainer.step, "optimizer"))
    report(f"joined {trainer.step} {trainer.rank} {trainer.world_size}")
    for step in trainer.steps(STEPS):
        if step == leaves_at:
            break
        if waits and step >= STEPS - ROOM and trainer.world_size < int(os.environ["WORLD_SIZE"]):
            wait_for_newcomers(trainer)
        for batch in trainer.fold([*batches(step)]):
            passes(step, "forward")
            loss = layers(batch).float().square().mean()
            loss.backward()
            time.sleep(PAUSE_S)
        prepare(layers)
        began = time.perf_counter()
        if trainer.commit():
            report(f"committed {step} {trainer.rank} {trainer.world_size}")
            passes(step, "committed")
        else:
            report(f"repeats {step} after {time.perf_counter() - began:.3f} s")
    report(f"digest {digest(layers, optimizer, schedule)}")
    return 0


def wait_for_newcomers(trainer: Any) -> None:
    """Wait until a newcomer asks to join, or the generation ends for another reason."""
    members = trainer._members
    key = f"joining/{members._generation.number}"
    while not members.interrupted and not members.roll.has(key):
        time.sleep(0.01)


def in_one_process(num_steps: int = STEPS) -> str:
    """Return the digest of plain torch in one process: it adds gradients along a tree of lists."""
    reading, writing = os.pipe()
    # A process that has used a GPU can't fork ranks that do.
    Fork(lambda: 0 * os.write(writing, _in_this_process(num_steps).encode()))
    os.close(writing)
    return os.read(reading, 99).decode()


def seed(step: int, shard: int) -> None:
    """Seed torch's generators as the trainer does."""
    drawn = hashlib.sha256(f"0,{step},{shard}".encode()).digest()
    torch.manual_seed(int.from_bytes(drawn[:8], "big") >> 1)


def _in_this_process(num_steps: int) -> str:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    layers, optimizer, schedule = model()
    for step in range(num_steps):
        gradients = []
        for shard, batch in enumerate(batches(step)):
            seed(step, shard)
            loss = layers(batch).float().square().mean()
            gradients.append(torch.autograd.grad(loss, [*layers.parameters()]))
        while len(gradients) > 1:
            pairs = zip(gradients[::2], gradients[1::2], strict=True)
            gradients = [
                tuple(a + b for a, b in zip(left, right, strict=True)) for left, right in pairs
            ]
        for parameter, total in zip(layers.parameters(), gradients[0], strict=True):
            parameter.grad = total / MICRO_BATCHES
        seed(step, -2)
        prepare(layers)
        optimizer.step()
        schedule.step()
    return digest(layers, optimizer, schedule)


@dataclass(frozen=True)
class Outcome:
    """A run: its exit statuses by seat, and what each rank reported, by the rank's process."""

    statuses: list[int]
    reports: dict[str, list[str]]  # "seat.pid" -> lines
    interrupts: list[str]  # why each generation ended, if it was interrupted
    convicted: dict[int, str]  # seat -> why an audit convicted it

    @property
    def digests(self) -> list[str]:
        """The digests that were reported."""
        said = [one for lines in self.reports.values() for one in lines]
        return [one.split()[1] for one in said if one.startswith("digest")]


def _store_process() -> tuple[Fork, int]:
    """Start a process that keeps a store, as torchrun's agent does. Return it and its port.

    The store has threads, and a process with threads should not fork.
    """
    reading, writing = os.pipe()

    def keep() -> int:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writing, store.port.to_bytes(2, "big"))
        signal.pause()
        return 0

    keeper = Fork(keep)
    os.close(writing)
    port = int.from_bytes(os.read(reading, 2), "big")
    os.close(reading)
    return keeper, port


def run(
    num_ranks: int,
    *,
    fault: Callable[[dict[int, int]], None] | None = None,
    target: Callable[[Report], int] = train,
    max_restarts: int = 50,
) -> Outcome:
    """Train on `num_ranks` ranks. `fault` is called again and again with the ranks' {seat: pid}."""
    keeper, port = _store_process()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def rank(seat: int) -> int:
            with (folder / f"{seat}.{os.getpid()}").open("w", buffering=1) as file:
                return target(lambda line: print(line, file=file))

        def supervisor(seat: int) -> int:
            os.environ.update(
                RANK=str(seat),
                WORLD_SIZE=str(num_ranks),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                TORCHELASTIC_USE_AGENT_STORE="True",
            )

            os.environ["INCARNATION"] = "0"

            def start() -> Fork:
                os.environ["INCARNATION"] = str(int(os.environ["INCARNATION"]) + 1)
                process = Fork(lambda: rank(seat))
                (folder / f"pid.{seat}.new").write_text(str(process.pid))
                (folder / f"pid.{seat}.new").rename(folder / f"pid.{seat}")
                return process

            first, at = start(), seat_of_launcher()
            return supervise(first, at, start=start, max_restarts=max_restarts, say=lambda _: None)

        supervisors = [Fork(partial(supervisor, seat)) for seat in range(num_ranks)]
        while any(one.poll() is None for one in supervisors):
            pids = {}
            for seat in range(num_ranks):
                if (file := folder / f"pid.{seat}").exists():
                    pids[seat] = int(file.read_text())
            if fault is not None and len(pids) == num_ranks:
                fault(pids)
            time.sleep(0.01 if fault is None else 0.001)
        reports = {
            file.name: file.read_text().splitlines()
            for file in folder.iterdir()
            if file.name[0].isdigit()
        }
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        prefixed = PrefixStore("entrenar-elastic//0", store)
        why = [
            f"{number}: {prefixed.get(f'interrupt/{number}').decode()}"
            for number in range(Roll(prefixed).newest() + 1)
            if Roll(prefixed).has(f"interrupt/{number}")
        ]
        why = [reason for reason in why if not reason.endswith(FINISHED)]
        reasons = {seat: Roll(prefixed).convicted(seat) for seat in range(num_ranks)}
        keeper.kill()
        convicted = {seat: reason for seat, reason in reasons.items() if reason}
        return Outcome([one.poll() or 0 for one in supervisors], reports, why, convicted)


class RandomFaults:
    """Kills or freezes a random rank at random moments, `num_faults` times."""

    def __init__(self, draw: random.Random, num_faults: int) -> None:
        self._draw, self._left = draw, num_faults
        self._next = time.monotonic() + draw.uniform(0, 0.4)
        self._frozen: dict[int, float] = {}  # pid -> when it goes on
        self.made: list[str] = []

    def __call__(self, pids: dict[int, int]) -> None:
        """Make the next fault if it is due, and let those go on that were frozen long enough."""
        for pid in [one for one, end in self._frozen.items() if time.monotonic() > end]:
            del self._frozen[pid]
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        if not self._left or time.monotonic() < self._next:
            return
        self._left -= 1
        self._next = time.monotonic() + self._draw.uniform(0, 0.3)
        seat = self._draw.choice(list(pids))
        number = self._draw.choice([signal.SIGKILL] * 4 + [signal.SIGSTOP])
        try:
            os.kill(pids[seat], number)
        except ProcessLookupError:
            return
        if number == signal.SIGSTOP:
            self._frozen[pids[seat]] = time.monotonic() + self._draw.uniform(0, 3 * DEADLINE_S)
        self.made.append(f"{number.name} of rank {seat}")


def fail(_: Report) -> int:
    """Fail as a script with an error does."""
    raise ZeroDivisionError


MOMENTS = ("forward", "backward", "exchange", "optimizer", "committed")


def dying(
    *deaths: Death, waits: bool = True, deadline_s: float = PATIENT_S
) -> Callable[[Report], int]:
    """Return a rank's function that ends at each of `deaths`, and `waits` for newcomers."""

    def rank(report: Report) -> int:
        def passes(step: int, moment: str) -> None:
            for death in deaths:
                death(step, moment)

        return train(report, passes, waits=waits, deadline_s=deadline_s)

    return rank


def cut(report: Report) -> int:
    """Say in step 2 that another rank's exchange was cut, which may leave garbage on this one."""
    said = list[int]()

    def passes(step: int, moment: str) -> None:
        if (step, moment, os.environ["RANK"]) == (2, "exchange", "1") and not said:
            said.append(seat_of_launcher().store.add("cut/0", 1))

    return train(report, passes, deadline_s=PATIENT_S)


def leave(report: Report) -> int:
    """Fail in an exchange, and call what Python would call at the end of a process."""
    atexit._clear()  # what was registered before the fork
    process = (os.environ["RANK"], os.environ["INCARNATION"])

    def passes(step: int, moment: str) -> None:
        if (step, moment, process) == (2, "exchange", ("1", "1")):
            raise ZeroDivisionError

    try:
        return train(report, passes, waits=True, deadline_s=PATIENT_S)
    finally:
        if process == ("1", "1"):
            atexit._run_exitfuncs()
        report(f"cuts {seat_of_launcher().store.add('cut/0', 0)}")


def leave_early(report: Report) -> int:
    """Leave the loop before step 3, when rank 1 has died that committed step 2."""
    dies = Death(1, 2, "committed")

    def passes(step: int, moment: str) -> None:
        dies(step, moment)
        while (step, moment) == (2, "committed") and not roll.has("dead/1.1"):
            time.sleep(0.01)

    roll = Roll(seat_of_launcher().store)
    return train(report, passes, leaves_at=3, deadline_s=PATIENT_S)


def planned(*names: str) -> dict[str, Any]:
    """Make the named runs of `test_elastic.py`, or all, and return what came of them."""
    most = min(4, torch.cuda.device_count()) if ON_GPUS else 4
    few = min(3, most)
    plans: dict[str, Callable[[], Outcome]] = {
        f"undisturbed {n}": partial(run, n, target=dying()) for n in range(1, few + 1)
    }
    for moment in MOMENTS:
        plans[f"dies in {moment}"] = partial(run, few, target=dying(Death(1, 2, moment)))
    if most == 4:
        two = dying(Death(0, 3, "exchange"), Death(2, 3, "forward"))
        plans |= {
            "undisturbed 4": partial(run, 4, target=dying()),
            "two die": partial(run, 4, target=two),
        }
    first = dying(Death(0, 3, "exchange"))
    plans["first rank dies"] = partial(run, most, target=first)
    all_die = dying(Death(0, 3, "forward"), Death(1, 3, "forward"))
    plans["all die"] = partial(run, 2, target=all_die)
    alone = dying(Death(1, 2, "backward"), waits=False)
    plans["not again"] = partial(run, 2, target=alone, max_restarts=0)
    plans["dies at once"] = partial(run, few, target=dying(Death(1, 0, "forward")))
    plans["dies in first exchange"] = partial(run, few, target=dying(Death(1, 0, "exchange")))
    newcomer = Death(1, None, "forward", incarnation=2)
    plans["newcomer dies"] = partial(run, few, target=dying(Death(1, 2, "forward"), newcomer))
    for name, step in (("freezes", 2), ("freezes at once", 0)):
        frozen = Death(1, step, "exchange", signal.SIGSTOP)
        plans[name] = partial(run, few, target=dying(frozen, deadline_s=FREEZE_S))
    plans["cut"] = partial(run, few, target=cut)
    plans["leaves"] = partial(run, few, target=leave)
    plans["leaves early"] = partial(run, 2, target=leave_early)
    plans["fails"] = partial(run, 2, target=fail, max_restarts=1)
    outcomes = dict[str, Any]()
    for name in names or plans:
        plan = plans[name]
        began = time.monotonic()
        outcomes[name] = asdict(plan())
        print(f"planned: {name}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    return {"one process": in_one_process(), **outcomes}


def in_a_process(module: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Make the planned runs of a module of this package, with torch loaded once for all ranks."""
    root = Path(__file__).resolve().parents[3]
    found = subprocess.run(
        [sys.executable, "-m", f"tests.train.elastic.{module}", "planned"],
        cwd=root,
        env={
            **os.environ,
            "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}",
            "OMP_NUM_THREADS": "1",
            **settings,
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return found


def soak(num_runs: int, seed: int) -> int:
    """Make runs with random faults. Return 1 if one of them ends with other weights."""
    right = in_one_process()
    wrong, faults, joins = 0, 0, 0
    for index in range(num_runs):
        draw = random.Random(f"{seed}.{index}")
        num_ranks = draw.randint(1, torch.cuda.device_count() if ON_GPUS else 4)
        fault = RandomFaults(draw, draw.randint(0, 4))
        began = time.monotonic()
        outcome = run(num_ranks, fault=fault)
        faults += len(fault.made)
        joins += sum(
            lines[0] != f"joined 0 {lines[0].split()[2]} {lines[0].split()[3]}"
            for lines in outcome.reports.values()
            if lines
        )
        # A rank that is killed after the end, before it has exited, is reported as killed.
        statuses = {*outcome.statuses} <= {0, -signal.SIGKILL % 256}
        if set(outcome.digests) != {right} or not statuses:
            wrong += 1
            print(f"ended otherwise: {outcome.statuses}, {outcome.digests}, {outcome.interrupts}")
        print(
            f"run {index}: {num_ranks} ranks, {fault.made}, {time.monotonic() - began:.1f} s",
            flush=True,
        )
    print(f"{num_runs} runs, {faults} faults, {joins} joins in mid-run: {wrong} ended otherwise")
    return 1 if wrong else 0


if __name__ == "__main__":
    if sys.argv[1] == "planned":
        print(json.dumps(planned(*sys.argv[2:])))
    else:
        sys.exit(soak(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
