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
from collections.abc import Callable
from functools import cache, partial
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from entrenar_py.shared.patience import Patience
from entrenar_py.train.wire_io.processes import Crew, Hand, Job
from tests.train.service.nursery import without_gpu

PATIENCE_S = 90.0
COMPILING_S = 300.0  # g++ takes a minute of them, if no kernel is kept
PRELOADED = (
    "entrenar_py.train.finetune.strategies.launch",
    "peft",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
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
    `on_gpus`.
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
        _gather(hands, COMPILING_S if compiles else PATIENCE_S)
        told = [Path(folder, f"{rank}.txt").read_text("utf-8") for rank in range(world_size)]
        codes = [None if hand.answer is None else int(hand.answer) for hand in hands]
        return codes, "".join(told)


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
        with Path(job["folder"], f"{rank}.txt").open("wb") as output:
            os.dup2(output.fileno(), sys.stdout.fileno())
            os.dup2(output.fileno(), sys.stderr.fileno())
        os.environ.update(job["variables"])
        from entrenar_py.train.finetune import cli
        from entrenar_py.train.service import measures

        if job["dies_before"] is not None:
            _before(job["dies_before"], lambda: os._exit(9))
        if job["copies_before"] is not None and rank == "0":
            trained = Path(job["argv"][0]).with_suffix("")
            copy = partial(shutil.copytree, trained, trained.with_name("broken"))
            _before(job["copies_before"], copy)
        if job["compiles"]:
            _compile_for_cpu()
        if job["by_buckets"]:
            from entrenar_py.train.arithmetic import on_device

            on_device.BYTES_MAX = 0
        measures.FACTOR = job["spike_factor"] or measures.FACTOR
        rendezvous = f"file://{job['folder']}/rendezvous"
        code = cli.rank(job["argv"], job["environment"], rendezvous)
        sys.stdout.flush()
        sys.stderr.flush()
        desk.answer(str(code).encode())
    os._exit(0)


def _before(step: int, action: Callable[[], object]) -> None:
    """Call `action` in this process before it trains `step`."""
    from entrenar_py.train.finetune.strategies.training_loop import Loop

    train = Loop._train

    def changed(loop: Loop) -> bool:
        if loop._step == step:
            action()
        return train(loop)

    Loop._train = changed  # type: ignore[method-assign, assignment]


def _compile_for_cpu() -> None:
    """Compile on the CPU, with the kernels that an earlier run has compiled if they are the same.

    torch's settings are part of their key, so all strategies have those of `ddp_canonical`. And no
    process takes a second to try out the vector instructions that the kernel reports, or starts
    others that load torch in order to compile.
    """
    import torch
    from torch._inductor import config

    from entrenar_py.train.model import workload

    workload.COMPILED = ("cpu", "cuda")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    config.cpp.vec_isa_ok = True
    config.compile_threads = 1
