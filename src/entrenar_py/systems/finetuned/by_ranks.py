"""A fine-tuning by ranks as torchrun starts them, by one of torch's own strategies.

The ranks run the module that torchrun runs, on the CPU with gloo, each a process of its own. What
they wrote is read back with stock libraries, and its outputs are compared with the textbook's.
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
from entrenar_py.systems.finetuned import outputs, small
from entrenar_py.systems.finetuned.asked import Asked
from entrenar_py.systems.finetuned.small import Made
from entrenar_py.systems.finetuned.textbook import Textbook
from entrenar_py.train.coordinator.recorder import Recorder
from entrenar_py.train.wire_io.processes import Crew, Hand, Job

MODULE = "entrenar_py.train.finetune.cli"  # what torchrun runs; a name, as users give it
PATIENCE_S = 120.0
_PRELOADED = (
    "peft",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "torch._dynamo.aot_compile",
    "torch.distributed.pipelining",
)
_NUM_ROWS = 3  # whose logits are compared


def run(scenario: Scenario) -> Trace:
    """Train as `scenario` says by its option `strategy`; record what was written."""
    asked, recorder = Asked.of(scenario), Recorder(scenario)
    with small.quiet(), tempfile.TemporaryDirectory() as folder:
        made = small.make(Path(folder), scenario, asked)
        config = Path(folder, "run.yaml")
        config.write_text(json.dumps(_configuration(scenario, made, asked)), encoding="utf-8")
        codes, struck, told = _torchrun(scenario, config)
        if set(codes) != {0}:
            return recorder.finish(status="failed", reason=f"ranks ended with {codes}: {told}")
        if struck and scenario.mutant is not None:
            recorder.emit(trace.Planted(name=scenario.mutant))
        for event in _read(made, asked):
            recorder.emit(event)
    return recorder.finish(status="completed")


def _configuration(scenario: Scenario, made: Made, asked: Asked) -> dict[str, Any]:
    """Return the configuration of the run. Raises UsageError if it would be another run."""
    settings, drawn = made.settings, scenario.num_steps * scenario.batch_size
    if scenario.num_samples % scenario.batch_size or drawn % scenario.num_samples:
        raise UsageError(
            f"num_samples={scenario.num_samples}, batch_size={scenario.batch_size}, "
            f"num_steps={scenario.num_steps}: use whole batches and whole epochs"
        )
    if scenario.optimizer != "adamw" or scenario.warmup_steps or scenario.stops:
        raise UsageError("use adamw, no warm-up and no stops with strategies")
    record: dict[str, Any] = {
        "model": str(settings.model),
        "task": asked.task,
        "method": asked.method,
        "output": str(settings.output),
        "strategy": asked.strategy,
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
            "rank": asked.rank,
            "alpha": asked.alpha,
            "dropout": scenario.dropout,
            "targets": list(settings.lora.targets),
        }
    if asked.task == "classify":
        labels = list(settings.classes.labels)
        record["classes"] = {"labels": labels, "weights": asked.class_weights}
    return record


def _read(made: Made, asked: Asked) -> Iterator[trace.Event]:
    """Yield what stock libraries read, with values, and its logits beside the textbook's."""
    model = outputs.stock_model(made, made.settings.output)
    tensors = {
        name: tensor.detach().numpy()
        for name, tensor in model.named_parameters()
        if not asked.adapts or ".lora_" in name or ".modules_to_save." in name
    }
    yield trace.ReadBack(
        by="peft" if asked.adapts else "transformers",
        tensors={name: trace.record_tensor(one, values=True) for name, one in tensors.items()},
    )
    shapes = {name: array.shape for name, array in tensors.items()}
    textbook, ids = Textbook(made, asked, shapes), range(_NUM_ROWS)
    tokens, mask, _ = textbook.batch(ids)
    with torch.no_grad():
        logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
    held = {name: torch.from_numpy(array) for name, array in tensors.items()}
    yield from textbook.logits("written model", logits, held, ids)


# --- the ranks ------------------------------------------------------------------------------------


@cache
def crew() -> Crew:
    """Return the processes of the ranks; they end with this process."""
    made = Crew(main, preload=_PRELOADED, one_job=True)
    atexit.register(made.dismiss)
    return made


def _torchrun(scenario: Scenario, config: Path) -> tuple[list[int | None], bool, str]:
    """Run the configuration; return exit codes, whether a mutant struck, and the first words."""
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
    """Be one rank, and end at once: gloo's threads sometimes hang when torch is shut down."""
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
            train = import_module(MODULE).main
            code = train([job["config"]], job["environment"], f"file://{folder}/rendezvous")
        desk.answer(json.dumps([code, planting.struck]).encode())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
