"""torchft's example never calls set_epoch, so its sampler gives each epoch the same order."""

from pathlib import Path

from torchft import DistributedSampler

GROUP = {"replica_rank": 0, "num_replica_groups": 2, "group_rank": 0, "num_replicas": 1}

if __name__ == "__main__":
    sampler = DistributedSampler(range(16), shuffle=True, **GROUP)
    epochs = [list(sampler) for _ in range(2)]
    sampler.set_epoch(1)
    calls = Path("train_ddp.py").read_text(encoding="utf-8").count("set_epoch")
    print(f"epochs: {epochs}, with set_epoch: {list(sampler)}; the script has {calls} calls of it")
    assert calls == 0
    assert epochs[0] == epochs[1] != list(sampler)
