"""torch's imagenet example, two processes without a GPU: nothing reduces their gradients."""

import sys
import tempfile

import main as script
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def train(rank, store):
    options = f"--dummy --no-accel --dist-backend gloo --dist-url file://{store} -j 0 --epochs 1"
    sys.argv = ["main.py", *options.split(), "--world-size", "2", "--rank", str(rank)]
    models = []
    script.train = lambda loader, model, *rest: models.append(model)
    script.validate = lambda *rest: 0
    script.save_checkpoint = lambda *rest: None
    script.main()
    assert not isinstance(models[0], DistributedDataParallel), "the model is wrapped"
    if rank == 0:
        print(f"seen: of two processes each trains a {type(models[0]).__name__} of its own")


if __name__ == "__main__":
    mp.spawn(train, (tempfile.mktemp(),), nprocs=2)
