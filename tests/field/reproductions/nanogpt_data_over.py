"""nanoGPT's init_from=resume seeds its generator as at the start: the same batches come again."""

import runpy
import sys
import tempfile

import torch

SMALL = "--device=cpu --compile=False --eval_iters=1 --eval_interval=3 --block_size=16"
SMALL += (
    " --batch_size=4 --n_layer=1 --n_head=2 --n_embd=16 --always_save_checkpoint=True --dropout=0.0"
)
out_dir = tempfile.mkdtemp()
drawn = []
randint = torch.randint


def recorded(*arguments, **named):
    places = randint(*arguments, **named)
    drawn.append(places.tolist())
    return places


def train(init_from, max_iters):
    drawn.clear()
    own = [f"--init_from={init_from}", f"--max_iters={max_iters}", f"--out_dir={out_dir}"]
    sys.argv = ["train.py", "config/train_shakespeare_char.py", *SMALL.split(), *own]
    runpy.run_path("train.py")
    return [*drawn]


torch.randint = recorded
first, resumed = train("scratch", 3), train("resume", 6)
assert resumed[: len(first)] == first, (first, resumed)
print(f"seen: after the resume the first {len(first)} batches are those of the start again")
