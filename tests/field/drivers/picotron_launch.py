"""Write picotron's configuration and start its train.py: RANKS STEPS FOLDER BATCH ACCUMULATION."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def configured(ranks: int, steps: int, folder: Path, batch: int, accumulation: int) -> Path:
    """Write the template's configuration, made tiny; go on from the last checkpoint there is."""
    config = json.loads(Path("template/base_config.json").read_text("utf-8"))
    config["distributed"] |= {"dp_size": ranks, "use_cpu": True}
    config["model"] |= {"name": "tiny-llama", "num_hidden_layers": 2, "num_attention_heads": 4}
    config["model"]["num_key_value_heads"] = 2
    config["training"] |= {"total_train_steps": steps, "seq_length": 16, "num_samples": None}
    config["training"] |= {"micro_batch_size": batch, "gradient_accumulation_steps": accumulation}
    config["dataset"]["name"] = "tiny-stories"
    saved = [int(path.name) for path in folder.iterdir() if path.name.isdigit()]
    last = str(folder / str(max(saved))) if saved else ""
    config["checkpoint"] = {"save_dir": str(folder), "save_frequency": 1, "load_path": last}
    config["environment"] |= {"FLASH_ATTEN": "0", "HF_TOKEN": "none"}
    path = folder / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


if __name__ == "__main__":
    ranks, steps, folder, batch, accumulation = sys.argv[1:]
    path = configured(int(ranks), int(steps), Path(folder), int(batch), int(accumulation))
    torchrun = ["torchrun", "--standalone", f"--nproc_per_node={ranks}"]
    os.execvp("torchrun", [*torchrun, "train.py", "--config", str(path)])
