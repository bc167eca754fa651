"""A student with a teacher beside the same student without one, on held-out rows.

    python -m tests.benchmarks.distilled_student

The teacher is the small model of `examples/finetune`, trained here on all of its rows. The student
is half as wide, has one layer, and sees few rows. Both students begin with the same weights, and
see the same rows in the same steps. Prints a JSON line for each number of rows. CI does not run it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.commands import ENTRENAR, run

EPOCHS_OF_TEACHER = 6


def configuration(folder: Path, **changes: Any) -> Path:
    """Write a configuration that trains all weights; return its path."""
    record = {
        "task": "text",
        "method": "full",
        "data": {"train": str(folder / "train.jsonl"), "max_tokens": 64},
        "training": {"batch_size": 16, "num_shards": 4, "learning_rate": 3e-3},
        **changes,
    }
    path = folder / f"{changes['output'].rpartition('/')[2]}.yaml"
    path.write_text(json.dumps(record), "utf-8")
    return path


def student(teacher: Path, folder: Path) -> None:
    """Write a smaller model with random weights, and the teacher's tokenizer."""
    import transformers

    torch.manual_seed(1)
    config = transformers.AutoConfig.from_pretrained(teacher)
    smaller = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 1}
    config.update({**smaller, "layer_types": config.layer_types[:1]})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(teacher / name, folder / name)


def perplexity(output: Path, folder: Path) -> float:
    """Return that of what a run trained, on the held-out rows."""
    command = [*ENTRENAR, "eval", str(output), "--data", str(folder / "test.jsonl")]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return float(told.rpartition("perplexity ")[2].split()[0].rstrip(",."))


def compared(folder: Path, number: int, given: argparse.Namespace) -> dict[str, Any]:
    """Train both students on the first `number` rows; return their perplexities."""
    lines = (folder / "train.jsonl").read_text("utf-8").splitlines()[:number]
    rows = folder / f"rows-{number}.jsonl"
    rows.write_text("\n".join(lines) + "\n", "utf-8")
    section = {
        "teacher": str(folder / "teacher"),
        "logits": str(folder / f"shards-{number}"),
        "top_k": given.top_k,
        "alpha": given.alpha,
        "temperature": given.temperature,
        "precision": "float32",
    }
    found: dict[str, float] = {}
    for name, more in (("with", {"distill": section}), ("without", {})):
        changes: dict[str, Any] = {
            "model": str(folder / "student"),
            "output": str(folder / f"{name}-{number}"),
            "data": {"train": str(rows), "max_tokens": 64},
            "training": {
                "batch_size": 16,
                "num_shards": 4,
                "learning_rate": 3e-3,
                "epochs": max(1, given.steps * 16 // number),
            },
            **more,
        }
        path = configuration(folder, **changes)
        if more:
            run("distill", "logits", str(path))
        run("finetune", str(path))
        found[name] = perplexity(folder / f"{name}-{number}", folder)
    return {"rows": number, "with_a_teacher": found["with"], "without": found["without"]}


def main() -> None:
    """Train the teacher, and both students on each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="50,100,200,400")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--top-k", type=int, default=64)
    parser.add_argument("--alpha", type=float, default=0.7)
    parser.add_argument("--temperature", type=float, default=2.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="entrenar-distilled-") as name:
        folder = Path(name)
        make = [sys.executable, "examples/finetune/make_small.py", str(folder)]
        subprocess.run(make, check=True, capture_output=True)
        training = {"batch_size": 16, "num_shards": 4, "learning_rate": 3e-3}
        path = configuration(
            folder,
            model=str(folder / "model"),
            output=str(folder / "teacher"),
            training={**training, "epochs": EPOCHS_OF_TEACHER},
        )
        run("finetune", str(path))
        student(folder / "teacher", folder / "student")
        taught = {"teacher": perplexity(folder / "teacher", folder)}
        print(json.dumps({**taught, **vars(given)}), flush=True)
        for number in map(int, given.rows.split(",")):
            print(json.dumps(compared(folder, number, given)), flush=True)


if __name__ == "__main__":
    main()
