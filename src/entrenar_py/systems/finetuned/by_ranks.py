"""Fine-tuning by ranks, as torchrun starts them, with one of torch's own strategies.

Each rank is a process that runs the same module as with torchrun, on the CPU with gloo. Stock
libraries read the output files back, and the model's outputs are compared with the results of
`textbook`.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch

from entrenar_py.shared import mutants, trace
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.patience import Patience
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Trace
from entrenar_py.systems.finetuned import small_run, textbook
from entrenar_py.systems.finetuned.small_run import Fixture, Request
from entrenar_py.systems.finetuned.textbook import Textbook
from entrenar_py.train.coordinator.recorder import Recorder
from entrenar_py.train.wire_io.processes import Crew, Hand, Job

MODULE = "entrenar_py.train.finetune.cli"  # the module that torchrun runs, by name, as users do
PATIENCE_S = 120.0
_PRELOADED = (
    "peft",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "torch._dynamo.aot_compile",
    "torch.distributed.pipelining",
)
_NUM_ROWS = 3  # rows to compare logits on


def run(scenario: Scenario) -> Trace:
    """Train as `scenario` says, with its option `strategy`; record the written files."""
    request, recorder = Request.of(scenario), Recorder(scenario)
    with small_run.quiet(), tempfile.TemporaryDirectory() as folder:
        fixture = small_run.make(Path(folder), scenario, request)
        config = Path(folder, "run.yaml")
        config.write_text(json.dumps(_configuration(scenario, fixture, request)), encoding="utf-8")
        codes, struck, told = _torchrun(scenario, config)
        if set(codes) != {0}:
            return recorder.finish(status="failed", reason=f"ranks ended with {codes}: {told}")
        if struck and scenario.mutant is not None:
            recorder.emit(trace.Planted(name=scenario.mutant))
        for event in _read(fixture, request):
            recorder.emit(event)
    return recorder.finish(status="completed")


def _configuration(scenario: Scenario, fixture: Fixture, request: Request) -> dict[str, Any]:
    """Return the configuration of the run. Raises UsageError if it can't express the scenario."""
    settings, drawn = fixture.settings, scenario.num_steps * scenario.batch_size
    if scenario.num_samples % scenario.batch_size or drawn % scenario.num_samples:
        raise UsageError(
            f"num_samples={scenario.num_samples}, batch_size={scenario.batch_size}, "
            f"num_steps={scenario.num_steps}: use whole batches and whole epochs"
        )
    if scenario.optimizer != "adamw" or scenario.warmup_steps or scenario.stops:
        raise UsageError("use adamw, no warm-up and no stops with strategies")
    record: dict[str, Any] = {
        "model": str(settings.model),
        "task": request.task,
        "method": request.method,
        "output": str(settings.output),
        "strategy": request.strategy,
        "seed": scenario.seed,
        "data": {"train": str(settings.data.train), "max_tokens": settings.data.max_tokens},
        "training": {
            "epochs": drawn // scenario.num_samples,
            "batch_size": scenario.batch_size,
            "num_shards": scenario.num_shards,
            "learning_rate": scenario.learning_rate,
            "schedule": scenario.schedule,
            "warmup_share": 0.0,
            "weight_decay": scenario.weight_decay,
            "clip_norm": scenario.clip_norm,
        },
    }
    if settings.adapts:
        record["lora"] = {
            "rank": request.rank,
            "alpha": request.alpha,
            "dropout": scenario.dropout,
            "targets": list(settings.lora.targets),
        }
    if request.task == "classify":
        labels = list(settings.classes.labels)
        record["classes"] = {"labels": labels, "weights": request.class_weights}
    return record


def _read(fixture: Fixture, request: Request) -> Iterator[trace.Event]:
    """Yield the tensors that stock libraries read, and logits compared with `textbook`'s."""
    model = textbook.stock_model(fixture, fixture.settings.output)
    tensors = {
        name: tensor.detach().numpy()
        for name, tensor in model.named_parameters()
        if not request.adapts or ".lora_" in name or ".modules_to_save." in name
    }
    yield trace.ReadBack(
        by="peft" if request.adapts else "transformers",
        tensors={name: trace.record_tensor(one, values=True) for name, one in tensors.items()},
    )
    shapes = {name: array.shape for name, array in tensors.items()}
    oracle, ids = Textbook(fixture, request, shapes), range(_NUM_ROWS)
    tokens, mask, _ = oracle.batch(ids)
    with torch.no_grad():
        logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
    held = {name: torch.from_numpy(array) for name, array in tensors.items()}
    yield from oracle.logits("written model", logits, held, ids)


# --- the ranks ------------------------------------------------------------------------------------


@cache
def crew() -> Crew:
    """Return the processes of the ranks; they end with this process."""
    workers = Crew(main, preload=_PRELOADED, one_job=True)
    atexit.register(workers.dismiss)
    return workers


def _torchrun(scenario: Scenario, config: Path) -> tuple[list[int | None], bool, str]:
    """Run the configuration; return exit codes, whether a mutant ran, and the first message."""
    size = scenario.world_size
    jobs = [
        {
            "config": str(config),
            "mutant": scenario.mutant,
            "environment": {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(size),
            },
        }
        for rank in range(size)
    ]
    hands = [crew().give(json.dumps(job).encode()) for job in jobs]
    _gather(hands)
    answers = [(None, False) if hand.answer is None else json.loads(hand.answer) for hand in hands]
    told = config.with_name("rank0.txt").read_text(encoding="utf-8", errors="replace")
    return [code for code, _ in answers], any(struck for _, struck in answers), told[-500:]


def _gather(hands: Sequence[Hand]) -> None:
    """Wait until every rank has answered or died."""
    patience, waiting = Patience(PATIENCE_S), list(hands)
    while waiting:
        ready = connection.wait([hand.pipe for hand in waiting], patience.interval_s)
        if not ready and patience.look():
            break
        for hand in [one for one in waiting if one.pipe in ready]:
            hand.heard()
            waiting.remove(hand)
    crew().gather(0.0)


def main(pipe: Connection) -> NoReturn:
    """Run as one rank, and exit at once: gloo's threads sometimes hang when torch shuts down."""
    torch.set_num_threads(1)
    desk = Job(pipe)
    message = desk.next()
    if message is not None:
        job = json.loads(message)
        folder, rank = Path(job["config"]).parent, job["environment"]["RANK"]
        with (folder / f"rank{rank}.txt").open("wb") as output:
            os.dup2(output.fileno(), sys.stdout.fileno())
            os.dup2(output.fileno(), sys.stderr.fileno())
        os.environ |= {"XDG_CACHE_HOME": str(folder / "cache"), "CUDA_VISIBLE_DEVICES": ""}
        with mutants.planted(job["mutant"]) as planting:
            train = import_module(MODULE).rank
            code = train([job["config"]], job["environment"], f"file://{folder}/rendezvous")
        desk.answer(json.dumps([code, planting.struck]).encode())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
