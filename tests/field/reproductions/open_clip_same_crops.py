"""OpenCLIP, stopped after an epoch and resumed: with which random numbers does it crop pictures?"""

import hashlib
import tempfile

import torch
from open_clip_train import main as script

OPTIONS = ("--train-data=pairs.csv", "--dataset-type=csv", "--model=tiny", "--device=cpu")
OPTIONS += ("--precision=fp32", "--batch-size=8", "--workers=0", "--name=run")
begun, train = [], script.train_one_epoch


def noted(*given, **named):
    begun.append(hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:8])
    return train(*given, **named)


script.train_one_epoch = noted
with tempfile.TemporaryDirectory() as straight, tempfile.TemporaryDirectory() as stopped:
    script.main([*OPTIONS, f"--logs={straight}", "--epochs=2"])
    script.main([*OPTIONS, f"--logs={stopped}", "--epochs=1"])
    script.main([*OPTIONS, f"--logs={stopped}", "--epochs=2", "--resume=latest"])
first, second, _, resumed = begun
assert first == resumed != second, begun
print(f"seen: states {first}, {second} before epochs 0 and 1; {resumed} before 1 after a resume")
