"""litgpt's LoRA ends with an example that rank 0 generates alone, with a model in pieces: it hangs.

The end of litgpt/finetune/lora.py's `fit`, with time limits of 20 s in place of 30 minutes."""

import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from litgpt.finetune.lora import parallelize_fn
from litgpt.lora import GPT, Config


def train(rank, store):
    limit = timedelta(seconds=20)
    dist.init_process_group("gloo", f"file://{store}", limit, 2, rank)
    names = ("data_parallel", "tensor_parallel")
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=names)
    config = Config.from_name("pythia-14m", n_layer=2, n_embd=16, intermediate_size=32)
    model = parallelize_fn(GPT(config), mesh)
    tokens = torch.ones(1, 4, dtype=torch.long)
    model(tokens).sum().backward()
    try:
        if rank == 0:  # if fabric.global_rank == 0: generate_example(...)
            model(tokens)
        dist.all_reduce(torch.ones(()))  # the count of tokens
        dist.barrier()
    except RuntimeError as error:
        print(f"seen: rank {rank} waits in vain: {str(error).splitlines()[0][-80:]}", flush=True)
    else:
        raise SystemExit("both ranks came to the end")


if __name__ == "__main__":
    mp.spawn(train, (tempfile.mktemp(),), nprocs=2)
