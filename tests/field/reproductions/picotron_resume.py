"""picotron's train.py, stopped after 2 steps and resumed for 2 more: which batches is it given?"""

import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import picotron_launch


def train(steps, folder):
    from picotron.data import MicroBatchDataLoader

    given, draw = [], MicroBatchDataLoader.__next__
    MicroBatchDataLoader.__next__ = lambda self: given.append(draw(self)) or given[-1]
    sys.argv = ["train.py", "--config", str(picotron_launch.configured(1, steps, folder, 4, 1))]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", DEVICE="cpu")
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    runpy.run_path("train.py", run_name="__main__")
    print("first tokens", [batch["input_ids"][0, :4].tolist() for batch in given])


if len(sys.argv) > 1:
    train(int(sys.argv[1]), Path(sys.argv[2]))
else:
    command = [sys.executable, __file__]
    with tempfile.TemporaryDirectory() as folder:
        texts = [subprocess.check_output([*command, n, folder], text=True) for n in ("2", "4")]
    first, resumed = (text.strip().splitlines()[-1] for text in texts)
    assert first == resumed, (first, resumed)
    print(f"seen: steps 0 and 1, and steps 2 and 3 after a resume, have the same {first}")
