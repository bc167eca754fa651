"""What a distillation costs: shards beside pyarrow, a teacher beside its bare forward pass, and a
student's step beside the same step without a teacher.

    python -m tests.benchmarks.distillation rows --rows 1000000 --top-k 128
    python -m tests.benchmarks.distillation teacher --shape 4b --backend cuda
    python -m tests.benchmarks.distillation student --shape 0.6b --backend cuda

Both sides run in turns, on the same rows. Prints JSON with the ratios. CI does not run it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from entrenar_py.train.distill import manifest, shards, teacher
from entrenar_py.train.distill.manifest import Facts
from entrenar_py.train.distill.production import Stage
from entrenar_py.train.distill.shards import File, Rows, ShardWriter
from entrenar_py.train.finetune import settings_file
from entrenar_py.train.model import preparation
from tests.benchmarks import commands, gpu_finetune

PIECE = 4_000  # rows made at a time
OF_SAMPLE = 100  # rows
UNCOUNTED = 4  # steps before the clock starts


# --- shards ---------------------------------------------------------------------------------------


def rows(given: argparse.Namespace) -> dict[str, Any]:
    """Write and read shards, and the same rows by pyarrow alone, in turns."""
    number, top_k = given.rows, given.top_k
    facts = Facts(
        teacher="0" * 32,
        tokenizer="0" * 32,
        data="0" * 32,
        vocabulary=151_936,
        top_k=top_k,
        stored="float16",
        precision="bfloat16",
        seed=0,
        batch_tokens=1,
        samples=(number // OF_SAMPLE,),
        rows=(number,),
    )
    starts = np.arange(0, number + 1, OF_SAMPLE)
    found: dict[str, list[float]] = {}
    sizes: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="entrenar-rows-") as name:
        folder = Path(name)
        for _ in range(given.runs):
            for kind, side in (("ours", _ours), ("pyarrow", _pyarrow)):
                for what, seconds in zip(
                    ("write", "read"), side(folder, facts, starts), strict=True
                ):
                    found.setdefault(f"{kind}_{what}", []).append(seconds)
            sizes = {path.name: path.stat().st_size for path in folder.glob("*.parquet")}
    num_bytes = number * (16 + 6 * top_k)
    rates = {what: num_bytes / min(times) / 1e6 for what, times in found.items()}
    return {
        "rows": number,
        "megabytes": round(num_bytes / 1e6),
        "files": sizes,
        **{f"{what}_mb_per_s": round(rate) for what, rate in rates.items()},
        "write_ratio": round(rates["ours_write"] / rates["pyarrow_write"], 3),
        "read_ratio": round(rates["ours_read"] / rates["pyarrow_read"], 3),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3),
    }


def _pieces(facts: Facts) -> Any:
    """Yield rows; what is drawn is drawn once, so that no side waits for it."""
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, facts.vocabulary, (PIECE, facts.top_k), dtype=np.int32)
    logs = -np.sort(draw.exponential(2.0, (PIECE, facts.top_k)), 1).astype(np.float16)
    position = np.tile(np.arange(OF_SAMPLE, dtype=np.int32), PIECE // OF_SAMPLE)
    for start in range(0, facts.rows[0], PIECE):
        sample = np.arange(start, start + PIECE, dtype=np.int32) // OF_SAMPLE
        yield Rows(sample, position, position, tokens, logs, np.full(PIECE, -3.0, np.float32))


def _ours(folder: Path, facts: Facts, starts: Any) -> tuple[float, float]:
    began = time.perf_counter()
    with closing(ShardWriter(folder, facts, 0, starts)) as file:
        for piece in _pieces(facts):
            file.add(piece)
        file.finish()
    written = time.perf_counter()
    opened = File(folder, facts, 0, starts)
    total = sum(len(opened.read(group)) for group in range(len(shards.groups(facts, starts))))
    assert total == facts.rows[0]
    return written - began, time.perf_counter() - written


def _pyarrow(folder: Path, facts: Facts, starts: Any) -> tuple[float, float]:
    """Write as pyarrow does by default, in row groups of the same size, and sync the file."""
    pa, form = manifest.arrow(), manifest.columns(facts, 0)
    path, began = folder / "pyarrow.parquet", time.perf_counter()
    with pa.parquet.ParquetWriter(path, form, compression="zstd", use_dictionary=False) as writer:
        for piece in _pieces(facts):
            writer.write_table(pa.Table.from_arrays(shards._arrays(form, piece), schema=form))
    with path.open("rb") as file:
        os.fsync(file.fileno())
    written = time.perf_counter()
    whole = pa.parquet.ParquetFile(path, memory_map=False)
    total = 0
    for group in range(whole.num_row_groups):
        total += len(whole.read_row_group(group, use_threads=False))
    assert total == facts.rows[0]
    return written - began, time.perf_counter() - written


# --- a teacher ------------------------------------------------------------------------------------


def configured(folder: Path, given: argparse.Namespace, **more: Any) -> Path:
    """Write a configuration for rows of a fixed length; return its path."""
    record = {
        "model": str(folder / "model"),
        "task": "text",
        "output": str(folder / more.pop("output", "out")),
        "precision": "bfloat16",
        "data": {"train": str(folder / "rows.jsonl"), "max_tokens": given.tokens + 1},
        "lora": {"rank": 16, "targets": ["q_proj", "v_proj"]},
        "training": {"batch_size": given.batch, "num_shards": 1, "schedule": "constant"},
        **more,
    }
    path = folder / "run.yaml"
    path.write_text(json.dumps(record), "utf-8")
    return path


def of_teacher(given: argparse.Namespace) -> dict[str, Any]:
    """Run the stage, and the forward passes of the same batches alone."""
    with tempfile.TemporaryDirectory(prefix="entrenar-teacher-") as name:
        folder = Path(name)
        gpu_finetune.checkpoint(folder / "model", given.shape)
        gpu_finetune.rows(folder / "rows.jsonl", given.samples, given.tokens)
        section = {
            "teacher": str(folder / "model"),
            "logits": str(folder / "shards"),
            "top_k": given.top_k,
            "batch_tokens": given.batch_tokens,
        }
        prepared = preparation.prepare(
            settings_file.load(configured(folder, given, distill=section)), folder / "cache"
        )
        stage = Stage(prepared, given.backend)
        loaded = stage._teacher()
        loaded._known = loaded.vocabulary  # the tokenizer has few words; a real one has all
        stage._teacher = lambda: loaded  # type: ignore[method-assign]
        for batch in _first(stage):  # kernels are chosen, and compiled
            loaded.module(input_ids=batch.tokens.to(loaded.device), use_cache=False)
            loaded.kept(batch.tokens, batch.places).arrays()
        bare, ours = [], []
        for _ in range(given.runs):
            bare.append(_bare(stage, loaded))
            for path in (folder / "shards").glob("*"):
                path.unlink()
            began = time.perf_counter()
            assert stage.run(lambda progress: None, threading.Event())
            ours.append(time.perf_counter() - began)
        num_tokens = int(prepared.train.starts[-1])
        return {
            "device": _device(given.backend),
            "shape": given.shape,
            "tokens": num_tokens,
            "bare_tokens_per_s": round(num_tokens / median(bare)),
            "ours_tokens_per_s": round(num_tokens / median(ours)),
            "ratio": round(median(bare) / median(ours), 3),
        }


def _first(stage: Stage) -> list[Any]:
    """Return batches of the first shard's first piece."""
    return list(stage._batches(next(stage._pieces(0))))[:4]


def _bare(stage: Stage, loaded: teacher.Teacher) -> float:
    """Return the seconds of the forward passes alone, logits included."""
    batches = [
        batch
        for shard in range(stage.facts.num_shards)
        for ids in stage._pieces(shard)
        for batch in stage._batches(ids)
    ]
    _wait(loaded.device)
    began = time.perf_counter()
    with torch.inference_mode():
        for batch in batches:
            loaded.module(input_ids=batch.tokens.to(loaded.device), use_cache=False)
    _wait(loaded.device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _device(backend: str) -> str:
    return torch.cuda.get_device_name() if backend.startswith("cuda") else "cpu"


# --- a student ------------------------------------------------------------------------------------


def of_student(given: argparse.Namespace) -> dict[str, Any]:
    """Train with a teacher's shards and without, in turns; compare the time of a step."""
    with tempfile.TemporaryDirectory(prefix="entrenar-student-") as name:
        folder = Path(name)
        gpu_finetune.checkpoint(folder / "model", given.shape)
        samples = given.batch * given.steps
        gpu_finetune.rows(folder / "rows.jsonl", samples, given.tokens)
        section = {
            "teacher": str(folder / "model"),
            "logits": str(folder / "shards"),
            "top_k": given.top_k,
        }
        path = configured(folder, given, distill=section)
        commands.run("distill", "logits", str(path), "--backend", given.backend)
        found: dict[str, list[float]] = {"with": [], "without": []}
        for number in range(given.runs):
            for kind in found:
                more = {"distill": section} if kind == "with" else {}
                path = configured(folder, given, output=f"{kind}-{number}", **more)
                commands.run("finetune", str(path), "--backend", given.backend)
                steps = commands.steps(folder / f"{kind}-{number}")[UNCOUNTED:]
                found[kind].append(median(one["step_ms"] for one in steps))
        return {
            "device": _device(given.backend),
            "shape": given.shape,
            "tokens_a_step": given.batch * given.tokens,
            **{f"{kind}_ms": [round(one, 1) for one in times] for kind, times in found.items()},
            "ratio": round(median(found["with"]) / median(found["without"]), 3),
        }


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("rows", "teacher", "student"))
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--top-k", type=int, default=128)
    parser.add_argument("--shape", choices=tuple(gpu_finetune.SHAPES), default="tiny")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4, help="rows of a student's step")
    parser.add_argument("--batch-tokens", type=int, default=8192, help="of a teacher's batch")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    sides = {"rows": rows, "teacher": of_teacher, "student": of_student}
    print(json.dumps(sides[given.what](given)), flush=True)


if __name__ == "__main__":
    main()
