"""DeepSpeed by its engine, as its documentation has it: stages 0 to 3 of ZeRO, accumulation,
clipping and a warm-up. On the CPU it runs with gloo: DS_ACCELERATOR=cpu."""

import argparse

import deepspeed
import torch
from torch.utils.data import TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--stage", type=int, default=0)
parser.add_argument("--global-batch", type=int, default=16)
parser.add_argument("--accumulation", type=int, default=1)
parser.add_argument("--clip", type=float, default=1.0)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--dir", help="folder of checkpoints, one after each step")
arguments = parser.parse_args()
deepspeed.ops.__compatible_ops__.clear()  # no collectives of its own, which it would compile

torch.manual_seed(0)
x = torch.randn(64, 8)
data = TensorDataset(x, x.sum(1, keepdim=True))
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
engine, optimizer, loader, schedule = deepspeed.initialize(
    model=model,
    model_parameters=model.parameters(),
    training_data=data,
    config={
        "train_batch_size": arguments.global_batch,
        "gradient_accumulation_steps": arguments.accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
        "gradient_clipping": arguments.clip,
        "zero_optimization": {"stage": arguments.stage},
        "bf16": {"enabled": arguments.bf16},
        "zero_allow_untested_optimizer": True,
    },
)
if arguments.dir:
    engine.load_checkpoint(arguments.dir)
while engine.global_steps < arguments.steps:
    for inputs, targets in loader:
        inputs, targets = inputs.to(engine.device), targets.to(engine.device)
        if arguments.bf16:
            inputs, targets = inputs.bfloat16(), targets.bfloat16()
        loss = torch.nn.functional.mse_loss(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        if engine.is_gradient_accumulation_boundary() and arguments.dir:
            engine.save_checkpoint(arguments.dir)
        if engine.global_steps >= arguments.steps:
            break
