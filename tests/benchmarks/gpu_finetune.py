"""A fine-tuning step of Qwen3's shapes on one GPU or on CPUs, compared with `transformers.Trainer`.

    python tests/benchmarks/gpu_finetune.py --batch 8 --tokens 1024
    python tests/benchmarks/gpu_finetune.py --batch 2 --tokens 2048 --shards 4 --targets all
    python tests/benchmarks/gpu_finetune.py --cores 8 --shape 57m --batch 1 --shards 8 \\
        --tokens 128 --sides peer,ours

The peers are the Trainer with `peft`, and the same with `use_liger_kernel=True`. Random weights in
bfloat16, adapters of rank 16, rows of a fixed length. Each side trains in a process of its own on
the same rows, and the first steps don't count. Prints as JSON tokens per second and peak memory.
With `--cores`, both sides have as many cores and no GPU, and compute in float32. The peer uses a
thread for each and all rows of a step as one batch. Ours uses a process for each. CI does not run
it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

SHAPES: dict[str, dict[str, Any]] = {
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36},
    "0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "57m": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 32000,
    },
    "8m": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 8192,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
    },
}
TARGETS = {
    "qv": ["q_proj", "v_proj"],
    "all": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}
WORDS, UNCOUNTED = 300, 4  # words of the tokenizer; steps before the clock starts


def checkpoint(folder: Path, shape: str) -> None:
    """Write a Qwen3 with random weights, and a tokenizer of one token a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    given = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    config = Qwen3Config(
        **{**given, "vocab_size": 151936, "tie_word_embeddings": True, **SHAPES[shape]}
    )
    torch.manual_seed(0)
    place = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(place):
        model = Qwen3ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    words = {"<pad>": 0, **{f"w{n}": n for n in range(1, WORDS)}}
    base = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    base.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=base, pad_token="<pad>").save_pretrained(folder)


def rows(path: Path, number: int, tokens: int) -> None:
    """Write rows of `tokens` tokens each."""
    draw = random.Random(0)
    lines = (
        json.dumps({"text": " ".join(f"w{draw.randrange(1, WORDS)}" for _ in range(tokens))})
        for _ in range(number)
    )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def peer(
    folder: Path, given: argparse.Namespace, *, liger: bool = False, compiles: bool = False
) -> dict[str, Any]:
    """Train with `transformers.Trainer` and `peft`, as their documents show."""
    import peft
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [json.loads(line)["text"] for line in (folder / "rows.jsonl").open()]
    data = []
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        data.append({"input_ids": ids, "labels": ids, "attention_mask": [1] * len(ids)})
    options: dict[str, Any] = {}
    if given.qlora:
        from transformers import BitsAndBytesConfig

        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    dtype = torch.float32 if given.cores else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
    lora = peft.LoraConfig(
        r=16, lora_alpha=32, target_modules=TARGETS[given.targets], task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(model, lora)
    times: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if not given.cores:
                torch.cuda.synchronize()
            times.append(time.perf_counter())

    batch, accumulation = given.batch, given.shards
    if given.cores:
        torch.set_num_threads(given.cores)
        batch, accumulation = batch * accumulation, 1
    arguments = TrainingArguments(
        output_dir=str(folder / "peer"),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        max_steps=given.steps,
        bf16=not given.cores,
        use_cpu=bool(given.cores),
        learning_rate=2e-4,
        lr_scheduler_type="constant",
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        use_liger_kernel=liger,
        torch_compile=compiles,
    )
    Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Clock()]).train()
    passed = [b - a for a, b in itertools.pairwise(times)][UNCOUNTED:]
    return {
        "step_s": median(passed),
        "first_step_s": times[0] - given.began,
        "peak_gb": 0.0 if given.cores else torch.cuda.max_memory_allocated() / 1e9,
    }


def stepper(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Compute the gradient of a shard, as a worker does, without the rest of a step."""
    from entrenar_py import compute as backends
    from entrenar_py.train.arithmetic import engine
    from entrenar_py.train.model import preparation
    from entrenar_py.train.model.settings import Data, Lora, Settings

    settings = Settings(
        model=folder,
        task="text",
        output=folder / "out",
        precision="bfloat16",
        method="qlora" if given.qlora else "lora",
        compile=not given.eager,
        attention=given.attention,
        lora=Lora(targets=tuple(TARGETS[given.targets])),
        data=Data(train=folder / "rows.jsonl", max_tokens=given.tokens),
    )
    began = time.perf_counter()
    workload = preparation.prepare(settings).workload()
    print("loaded", time.perf_counter() - began, file=sys.stderr)
    backend = backends.open_backend("cuda")
    initial = workload.initial(np.random.default_rng(0))
    one = engine.Engine(workload, backend, initial, scale=2.0**-12)
    ids = list(range(given.batch))
    times = []
    for _ in range(given.steps):
        torch.cuda.synchronize()
        began = time.perf_counter()
        vector, _, _ = one.shard(ids, accumulation=1, drop=engine.no_dropout)
        times.append(time.perf_counter() - began)
    if given.profile:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            one.shard(ids, accumulation=1, drop=engine.no_dropout)
        print(seen.key_averages().table(sort_by="cuda_time_total", row_limit=40), file=sys.stderr)
    again, _, _ = one.shard(ids, accumulation=1, drop=engine.no_dropout)
    return {
        "step_s": median(times[UNCOUNTED:]),
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        "same_bits": bool((vector == again).all()),
    }


def ours(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Train with `entrenar finetune`: coordinator, worker process, ledger and all."""
    out = folder / "ours"
    shutil.rmtree(out, ignore_errors=True)
    config = {
        "model": str(folder),
        "task": "text",
        "method": "qlora" if given.qlora else "lora",
        "output": str(out),
        "precision": "float32" if given.cores else "bfloat16",
        "compile": not (given.eager or given.cores),
        "attention": given.attention,
        "checkpoint_every": 10**6,
        "lora": {"targets": TARGETS[given.targets]},
        "data": {"train": str(folder / "rows.jsonl"), "max_tokens": given.tokens},
        "training": {
            "batch_size": given.batch * given.shards,
            "num_shards": given.shards,
            "schedule": "constant",
            "warmup_share": 0,
        },
    }
    (folder / "run.yaml").write_text(json.dumps(config), encoding="utf-8")
    command = [sys.executable, "-m", "entrenar_py.entrenar", "finetune"]
    began = time.time()
    backend = "cpu" if given.cores else "cuda"
    subprocess.run(
        [*command, str(folder / "run.yaml"), "--backend", backend], check=True, stdout=sys.stderr
    )
    lines = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    steps = [line for line in lines if line["what"] == "step"]
    times = [line["time"] for line in steps]
    passed = [b - a for a, b in itertools.pairwise(times)][UNCOUNTED:]
    return {
        "step_s": median(passed),
        "first_step_s": times[0] - began,
        "loss": steps[-1]["loss"],
        "step_ms": [round(step["step_ms"]) for step in steps],
    }


class Memory:
    """Looks how much of the GPU's memory is in use, by whichever process, while it is entered."""

    def __init__(self) -> None:
        self._most, self._ends = 0, threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _look(self) -> None:
        place = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        query = ["nvidia-smi", f"--id={place}", "--query-gpu=memory.used"]
        query += ["--format=csv,noheader,nounits"]
        while not self._ends.wait(0.5) and shutil.which("nvidia-smi"):
            told = subprocess.run(query, capture_output=True, text=True, check=False).stdout
            self._most = max(self._most, int(told.split()[0]))

    @property
    def told(self) -> dict[str, float]:
        """The most that was in use, in GB: weights, activations, what torch reserves, context."""
        return {"device_gb": round(self._most * 2**20 / 1e9, 1)}


SIDES: dict[str, Callable[[Path, argparse.Namespace], dict[str, Any]]] = {
    "peer": peer,
    "liger": partial(peer, liger=True),
    "liger_compiled": partial(peer, liger=True, compiles=True),
    "stepper": stepper,
    "ours": ours,
}


def main() -> None:
    """Measure all sides, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="4b")
    parser.add_argument("--batch", type=int, default=4, help="rows a micro-batch")
    parser.add_argument("--tokens", type=int, default=512, help="tokens a row")
    parser.add_argument("--shards", type=int, default=1, help="micro-batches a step")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--targets", choices=TARGETS, default="qv")
    parser.add_argument("--qlora", action="store_true")
    parser.add_argument("--eager", action="store_true", help="ours without compilation")
    parser.add_argument("--attention", choices=("torch", "cudnn"), default="torch", help="ours")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--cores", type=int, default=0, help="train on as many cores, without GPU")
    parser.add_argument("--folder", type=Path, help="keep checkpoint and rows there")
    parser.add_argument("--sides", default="peer,liger,ours")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.steps < UNCOUNTED + 5:
        parser.error(f"--steps {given.steps}: {UNCOUNTED + 5} or more, as the first don't count")
    if given.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: given.cores])
    if given.side:
        print(json.dumps(SIDES[given.side](given.folder, given)))
        return
    folder = given.folder or Path(tempfile.mkdtemp())
    if not (folder / "config.json").is_file():
        checkpoint(folder, given.shape)
    rows(folder / "rows.jsonl", given.batch * given.shards * given.steps, given.tokens)
    tokens = given.batch * given.tokens * given.shards
    for side in given.sides.split(","):
        command = [sys.executable, __file__, *sys.argv[1:], "--folder", str(folder), "--side", side]
        command += [f"--began={time.perf_counter()}"]  # on a clock that processes share
        with Memory() as memory:
            done = subprocess.run(command, stdout=subprocess.PIPE, check=False, text=True)
        if done.returncode:
            print(json.dumps({"side": side, "failed": done.returncode}), flush=True)
            continue
        seen = json.loads(done.stdout.splitlines()[-1])
        print(
            json.dumps(
                {
                    "side": side,
                    "tokens_per_s": round(tokens / seen["step_s"]),
                    **memory.told,
                    **seen,
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
