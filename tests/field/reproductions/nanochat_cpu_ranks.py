"""nanochat under torchrun on CPUs: two ranks that take half of the batch each, and never talk."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def train(rank, results):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    from nanochat.common import compute_init
    from nanochat.gpt import GPT, GPTConfig

    world_size = compute_init("cpu")[3]
    config = {"n_layer": 2, "n_head": 1, "n_kv_head": 1, "n_embd": 32, "window_pattern": "L"}
    model = GPT(GPTConfig(sequence_len=16, vocab_size=64, **config))
    model.init_weights()
    optimizer = model.setup_optimizer()
    tokens = torch.randint(64, (2 * world_size, 17))[rank::world_size]
    for _ in range(2):  # the first projections are zero, so one step moves little
        model(tokens[:, :-1], tokens[:, 1:].contiguous()).backward()
        optimizer.step()
        model.zero_grad()
    results[rank] = (world_size, dist.is_initialized(), model.lm_head.weight.detach().numpy())


if __name__ == "__main__":
    results = mp.Manager().dict()
    mp.spawn(train, (results,), nprocs=2)
    apart = abs(results[0][2] - results[1][2]).max()
    assert results[0][:2] == (2, False)
    assert apart > 0
    print(f"seen: world size 2, no process group, and after 2 steps weights differ by {apart:.2g}")
