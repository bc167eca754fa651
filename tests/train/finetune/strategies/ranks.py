"""Ranks as torchrun starts them, forked from a process with all modules loaded: a second, not ten.

Also tiny checkpoints, and the run of one process that all strategies are compared with.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import cache, partialmethod
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from entrenar_py.shared.patience import Patience
from entrenar_py.train.elastic.membership import Roll
from entrenar_py.train.wire_io.processes import Crew, Hand, Job
from tests.train.service.nursery import CHECKPOINT_MODULES, without_gpu

PATIENCE_S = 90.0
PRELOADED = (
    "entrenar_py.train.finetune.strategies.launch",
    *CHECKPOINT_MODULES,
    "torch._dynamo.aot_compile",
    "torch.distributed.pipelining",
)


@cache
def crew() -> Crew:
    """Return the processes of the ranks; they end with this process."""
    made = Crew(main, preload=without_gpu(PRELOADED), one_job=True)
    atexit.register(made.dismiss)
    return made


def torchrun(
    config: Path,
    world_size: int,
    *options: str,
    dies_before: int | None = None,
    copies_before: int | None = None,
    spike_factor: float | None = None,
    on_gpus: bool = False,
    compiles: bool = False,
    by_buckets: bool = False,
) -> tuple[list[int | None], str]:
    """Run the configuration by `world_size` ranks; return their exit codes, and what they said.

    All ranks die before step `dies_before`. A rank that died has no exit code. Before step
    `copies_before`, the output folder is copied to `broken`: what a run that dies there leaves. A
    norm of more than `spike_factor` medians is a spike. Ranks see no GPU unless they are to run
    `on_gpus`. With `compiles`, the programs of each rank are in NAME.RANK.programs.
    """
    with tempfile.TemporaryDirectory(prefix="entrenar-ranks-") as folder:
        jobs = [
            {
                "argv": [str(config), *options],
                "folder": folder,
                "dies_before": dies_before,
                "copies_before": copies_before,
                "spike_factor": spike_factor,
                "compiles": compiles,
                "by_buckets": by_buckets,
                "environment": {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(world_size),
                    "LOCAL_WORLD_SIZE": str(world_size),
                },
                "variables": {
                    "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", folder),
                    **({} if on_gpus else {"CUDA_VISIBLE_DEVICES": ""}),
                },
            }
            for rank in range(world_size)
        ]
        hands = [crew().give(json.dumps(job).encode()) for job in jobs]
        _gather(hands, PATIENCE_S)
        told = [Path(folder, f"{rank}.txt").read_text("utf-8") for rank in range(world_size)]
        codes = [None if hand.answer is None else int(hand.answer) for hand in hands]
        return codes, "".join(told)


def elastically(
    config: Path,
    num_seats: int,
    *options: str,
    deaths: Mapping[int, str] | None = None,
    waits_before: int | None = None,
    successors: Path | None = None,
    spikes: bool = False,
    least_s: float | None = None,
    slow_at: str | None = None,
) -> tuple[dict[int, list[int | None]], str]:
    """Run the configuration by elastic ranks; return each seat's exit codes, and what they said.

    A seat's first process kills itself at its moment of `deaths`, such as `made:1` (`_kill_at`) or
    `write:7:0.5` (`_kill_in_write`), hangs (`_hang`) or lags (`_lag`), and gets a successor, as
    from a supervisor. Before step `waits_before`, ranks wait for it. It runs the configuration
    `successors`, by default the same. With `spikes`, nearly every norm is a spike. A rank that
    hangs may take `least_s` in steps that only compute. All are slow in `slow_at` (`_slow_down`).
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    roll = Roll(PrefixStore("entrenar-elastic//0", store))
    codes: dict[int, list[int | None]] = {seat: [] for seat in range(num_seats)}
    with tempfile.TemporaryDirectory(prefix="entrenar-ranks-") as folder:

        def start(seat: int, path: Path, death: str | None) -> Hand:
            job = {
                "argv": [str(path), *options],
                "folder": folder,
                "kills_at": death,
                "waits_before": waits_before,
                "spike_factor": 0.1 if spikes else None,
                "spike_least": 1 if spikes else None,
                "least_s": least_s,
                "slow_at": slow_at,
                "environment": {
                    "RANK": str(seat),
                    "LOCAL_RANK": str(seat),
                    "WORLD_SIZE": str(num_seats),
                    "LOCAL_WORLD_SIZE": str(num_seats),
                },
                "variables": {
                    "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", folder),
                    "CUDA_VISIBLE_DEVICES": "",
                    "RANK": str(seat),
                    "WORLD_SIZE": str(num_seats),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(store.port),
                    "TORCHELASTIC_USE_AGENT_STORE": "True",
                },
            }
            return crew().give(json.dumps(job).encode())

        hands = {seat: start(seat, config, (deaths or {}).get(seat)) for seat in range(num_seats)}
        patience = Patience(PATIENCE_S)
        while hands:
            ready = connection.wait([hand.pipe for hand in hands.values()], patience.interval_s)
            if not ready and patience.look():
                break
            for seat, hand in [one for one in hands.items() if one[1].pipe in ready]:
                hand.heard()
                codes[seat].append(None if hand.answer is None else int(hand.answer))
                del hands[seat]
                if roll.has("ended"):
                    continue
                roll.bury(seat)
                if hand.answer is None:
                    hands[seat] = start(seat, successors or config, None)
                else:
                    roll.leave(seat)
        crew().gather(0.0)
        return codes, "".join(
            path.read_text("utf-8") for path in sorted(Path(folder).glob("*.txt"))
        )


def _gather(hands: list[Hand], seconds: float) -> None:
    """Wait until every rank has answered or died, or patience for `seconds` has run out."""
    patience, waiting = Patience(seconds), list(hands)
    while waiting:
        ready = connection.wait([hand.pipe for hand in waiting], patience.interval_s)
        if not ready and patience.look():
            break
        for hand in [one for one in waiting if one.pipe in ready]:
            hand.heard()
            waiting.remove(hand)
    crew().gather(0.0)


def main(pipe: Connection) -> NoReturn:
    """Be one rank, and end at once: gloo's threads sometimes hang when torch is shut down."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    desk = Job(pipe)
    message = desk.next()
    if message is not None:
        job = json.loads(message)
        rank = job["environment"]["RANK"]
        with Path(job["folder"], f"{rank}.txt").open("ab") as output:
            os.dup2(output.fileno(), sys.stdout.fileno())
            os.dup2(output.fileno(), sys.stderr.fileno())
        os.environ.update(job["variables"])
        from entrenar_py.train.finetune import cli
        from entrenar_py.train.service import measures

        if job.get("waits_before") is not None:
            _before(job["waits_before"], _wait_for_newcomers)
        if (job.get("kills_at") or "").startswith("lags:"):
            _lag(int(job["kills_at"].removeprefix("lags:")))
        elif (job.get("kills_at") or "").startswith("hangs:"):
            _before(int(job["kills_at"].removeprefix("hangs:")), _hang)
        elif (job.get("kills_at") or "").startswith("write:"):
            _kill_in_write(*job["kills_at"].removeprefix("write:").split(":"))
        elif job.get("kills_at"):
            _kill_at(job["kills_at"])
        if job.get("slow_at") is not None:
            _slow_down(job["slow_at"])
        if job.get("dies_before") is not None:
            _before(job["dies_before"], lambda _: os._exit(9))
        if job.get("copies_before") is not None and rank == "0":
            trained = Path(job["argv"][0]).with_suffix("")
            broken = trained.with_name("broken")
            _before(job["copies_before"], lambda _: shutil.copytree(trained, broken))
        if job.get("compiles"):
            _compile_for_cpu(Path(job["argv"][0]).with_suffix(f".{rank}.programs"))
        if job.get("by_buckets"):
            from entrenar_py.train.arithmetic import on_device

            on_device.BYTES_MAX = 0
        measures.FACTOR = job.get("spike_factor") or measures.FACTOR
        measures.STEPS_LEAST = job.get("spike_least") or measures.STEPS_LEAST
        if job.get("least_s") is not None:
            from entrenar_py.train.finetune.strategies import elastic

            elastic.LEAST_S = job["least_s"]
        rendezvous = f"file://{job['folder']}/rendezvous"
        try:
            code = cli.rank(job["argv"], job["environment"], rendezvous)
        except SystemExit as end:  # of a newcomer, if the run has ended
            code = int(end.code or 0)
        sys.stdout.flush()
        sys.stderr.flush()
        desk.answer(str(code).encode())
    os._exit(0)


def _wait_for_newcomers(loop: Any) -> None:
    """Wait until a newcomer asks to join, if a seat is empty."""
    trainer = loop._strategy._trainer
    members = trainer._members
    key = f"joining/{trainer.generation.number}"
    while trainer.world_size < members._num_seats and not members.interrupted:
        if members.roll.has(key):
            break
        time.sleep(0.01)


def _hang(loop: Any) -> None:
    """Wait until the others have given up this rank. Then end, as by a supervisor."""
    members = loop._strategy._trainer._members
    while not members.roll.excludes(members.seat):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


SLOW_S = 4.0


def _slow_down(moment: str) -> None:
    """Take `SLOW_S` once: for the `first` step, or for the writer's `save` or `scored`."""
    from entrenar_py.train.finetune.strategies.elastic import SharedRecord
    from entrenar_py.train.finetune.strategies.training_loop import Loop

    is_first = moment == "first"
    owner: Any = Loop if is_first else SharedRecord
    name = "_train" if is_first else moment
    before, made = getattr(owner, name), list[str]()

    def changed(one: Any, *arguments: Any) -> Any:
        if not made and (is_first or one._is_open):
            made.append(moment)
            time.sleep(SLOW_S)
        return before(one, *arguments)

    setattr(owner, name, changed)


def _before(step: int, action: Callable[[Any], object]) -> None:
    """Call `action` with the loop in this process before it trains `step`."""
    from entrenar_py.train.finetune.strategies.training_loop import Loop

    train = Loop._train

    def changed(loop: Loop) -> bool:
        if loop._step == step:
            action(loop)
        return train(loop)

    Loop._train = changed  # type: ignore[method-assign, assignment]


def _lag(step: int) -> None:
    """Let the others commit `step`, and not this process, once: as if it had not received all."""
    from entrenar_py.train.elastic.membership import InterruptedGenerationError
    from entrenar_py.train.elastic.trainer import ElasticTrainer

    before, lagged = ElasticTrainer._require_valid, list[int]()

    def changed(trainer: ElasticTrainer) -> None:
        if trainer.step == step and not lagged:
            lagged.append(step)
            time.sleep(0.5)
            trainer._members.interrupt("a test")
            raise InterruptedGenerationError
        before(trainer)

    ElasticTrainer._require_valid = changed  # type: ignore[method-assign, assignment]


def _kill_at(moment: str) -> None:
    """Kill this process when it comes to a moment: NAME:STEP, or NAME.

    Before it trains a step, or writes its record, scores or checkpoint, the output or the page.
    With `stop` it gets SIGTERM, before it trains a step.
    """
    from entrenar_py.train.finetune import task
    from entrenar_py.train.finetune.strategies import launch
    from entrenar_py.train.finetune.strategies.elastic import SharedRecord
    from entrenar_py.train.finetune.strategies.training_loop import Loop

    name, _, number = moment.partition(":")
    owner, function = {
        "train": (Loop, "_train"),
        "made": (SharedRecord, "made"),
        "scored": (SharedRecord, "scored"),
        "save": (SharedRecord, "save"),
        "output": (launch, "_finish"),
        "page": (task, "draw"),
        "stop": (Loop, "_train"),
    }[name]
    before: Any = getattr(owner, function)

    def changed(*arguments: Any, **more: Any) -> Any:
        if owner is Loop:
            step = arguments[0]._step
        elif name == "made":
            step = arguments[1].number
        else:
            step = arguments[1].step if owner is SharedRecord else ""
        if str(step) == number:
            os.kill(os.getpid(), signal.SIGTERM if name == "stop" else signal.SIGKILL)
        return before(*arguments, **more)

    setattr(owner, function, changed)


def _kill_in_write(number: str, share: str) -> None:
    """Kill this process in its write `number` to the record: a `share` of its bytes is written.

    Counted are lines of the ledger that are written together, lines of the metrics, and
    checkpoints, which are written as a whole or not at all.
    """
    from io import FileIO

    from entrenar_py.shared.trace import writer
    from entrenar_py.train.arithmetic import checkpoint
    from entrenar_py.train.finetune import task
    from entrenar_py.train.service import metrics

    left = [int(number)]

    def is_last() -> bool:
        left[0] -= 1
        return left[0] < 0

    class Dying(FileIO):
        def write(self, data: Any) -> int:
            if is_last():
                super().write(data[: int(len(data) * float(share))])
                os.kill(os.getpid(), signal.SIGKILL)
            return super().write(data)

    save = checkpoint.save

    def save_or_die(path: Path, *arguments: Any) -> None:
        if path.name == task.CHECKPOINT and is_last():
            os.kill(os.getpid(), signal.SIGKILL)
        save(path, *arguments)

    writer.FileIO = metrics.FileIO = Dying  # type: ignore[attr-defined]
    checkpoint.save = save_or_die  # type: ignore[assignment]


def _compile_for_cpu(programs: Path) -> None:
    """Compile blocks for the CPU, too: torch traces them, and its own kernels run the programs.

    Each program is written to the file `programs`, in the order in which they are made, with the
    sizes that came first: a compiler may choose kernels by them.
    """
    from torch import nn

    from entrenar_py.train.model import workload

    def noted(program: Any, inputs: Any) -> Any:
        sizes: list[Any] = [size for one in inputs if hasattr(one, "shape") for size in one.shape]
        first = [one.node.hint if hasattr(one, "node") else one for one in sizes]
        with programs.open("a", encoding="utf-8") as file:
            file.write(f"{program.print_readable(print_output=False)}\n{first}\n")
        return program.forward

    workload.COMPILED = ("cpu", "cuda")
    compiled: Any = partialmethod(nn.Module.compile, backend=noted)
    nn.Module.compile = compiled  # type: ignore[method-assign]
