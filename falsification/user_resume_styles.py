"""More scripts that stop and resume: two optimizers with a record of states, and a sharded one.

`make twins` tries all of them.
"""

from __future__ import annotations

from functools import partial

from falsification.user_trainers import Twin

ITSELF = """\
# Goes on by itself from last.pt in its own folder, which a thread writes every second step.
import os
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import entrenar_py

STEPS, BATCHES = 9, 3


class Feed:
    def __init__(self):
        self.handed_out = 0

    def epoch(self, number):
        order = torch.randperm(24, generator=torch.Generator().manual_seed(number)).tolist()
        for at in range(self.handed_out, BATCHES):
            self.handed_out = at + 1
            yield number, order[8 * at : 8 * at + 8][rank::world]
        self.handed_out = 0


class Writer(threading.Thread):
    # `go` stands for a busy disk: the file is written while the next step is made.
    def __init__(self, kept):
        super().__init__()
        self.kept, self.go = kept, threading.Event()
        self.start()

    def run(self):
        self.go.wait()
        torch.save(self.kept, "last.pt.new")
        os.replace("last.pt.new", "last.pt")


def copied(state):
    return torch.utils._pytree.tree_map(
        lambda held: held.clone() if isinstance(held, torch.Tensor) else held, state
    )


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(5)
whole = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
model = DistributedDataParallel(whole)
optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
inputs = torch.randn(24, 4)
feed, step, writer = Feed(), 0, None
if os.path.exists("last.pt"):
    kept = torch.load("last.pt")
    whole.load_state_dict(kept["whole"])
    optimizer.load_state_dict(kept["optimizer"])
    step = kept["step"]
    feed.handed_out = kept["handed_out"] % BATCHES
obs = entrenar_py.observe(model, optimizer, step=step)
epoch = step // BATCHES
while step < STEPS:
    for number, ids in feed.epoch(epoch):
        loss = model(inputs[ids]).square().mean()
        obs.samples(ids, epoch=number)
        obs.loss(loss, len(ids))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if rank == 0 and writer:
            writer.go.set()
            writer.join()
            writer = None
        if rank == 0 and step % 2 == 0:
            state = {"whole": whole.state_dict(), "optimizer": optimizer.state_dict()}
            place = {"step": step, "handed_out": feed.handed_out}
            writer = Writer({**copied(state), **place})
        dist.barrier()
    epoch += 1
if writer:
    writer.go.set()
    writer.join()
dist.destroy_process_group()
"""

TWO_NETWORKS = """\
# Two networks and two optimizers in one record of states, and a generator that yields batches.
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import entrenar_py


class States(dict):
    def save(self, path):
        kept = {k: v.state_dict() if hasattr(v, "state_dict") else v for k, v in self.items()}
        torch.save(kept, path + ".new")
        os.replace(path + ".new", path)

    def restore(self, path):
        for key, kept in torch.load(path, weights_only=False).items():
            if hasattr(self[key], "load_state_dict"):
                self[key].load_state_dict(kept)
            else:
                self[key] = kept


def batches(generator):
    epoch = 0
    while True:
        order = torch.randperm(24, generator=generator).tolist()
        for at in range(0, 24, 8):
            yield epoch, order[at : at + 8][rank::world]
        epoch += 1


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(3)
maker = nn.Linear(3, 4)
critic = nn.Sequential(nn.Linear(4, 5), nn.LeakyReLU(), nn.Linear(5, 1))
both = nn.ModuleList([maker, critic])
for_maker = torch.optim.RMSprop(maker.parameters(), lr=1e-3, momentum=0.5)
for_critic = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))
decay = torch.optim.lr_scheduler.StepLR(for_critic, 2, 0.5)
real, noise = torch.randn(24, 4), torch.randn(24, 3)
states = States(
    maker=maker, critic=critic, for_maker=for_maker, for_critic=for_critic, decay=decay, step=0
)
path = os.path.join(sys.argv[2], "states.pth")
if os.path.exists(path):
    states.restore(path)
obs = entrenar_py.observe(both, [for_maker, for_critic], step=states["step"])
stream = batches(torch.Generator().manual_seed(9))
for _ in range(states["step"]):
    next(stream)
while states["step"] < int(sys.argv[1]):
    epoch, ids = next(stream)
    obs.samples(ids, epoch=epoch)
    made = maker(noise[ids])
    loss = (1 - critic(real[ids])).relu().mean() + (1 + critic(made)).relu().mean()
    obs.loss(loss, len(ids))
    both.zero_grad()
    loss.backward()
    for parameter in both.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world
    for parameter in maker.parameters():
        parameter.grad.neg_()
    for_critic.step()
    for_maker.step()
    decay.step()
    states["step"] += 1
    if rank == 0:
        states.save(path)
    dist.barrier()
obs.close()
dist.destroy_process_group()
"""

SHARDED = """\
# Optimizer state that is spread over ranks, and brought together for the checkpoint.
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
data = torch.randn(32, 4)
file, step = os.path.join(sys.argv[2], "checkpoint.pt"), 0
net = DistributedDataParallel(model)
optimizer = ZeroRedundancyOptimizer(
    net.parameters(), optimizer_class=torch.optim.Adam, lr=0.01
)
if os.path.exists(file):
    kept = torch.load(file, weights_only=False)
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    step = kept["step"]
obs = entrenar_py.observe(net, optimizer, step=step)
while step < int(sys.argv[1]):
    at = step * 8 % 32
    ids = list(range(at, at + 8))[rank::world]
    obs.samples(ids, epoch=step * 8 // 32)
    loss = (net(data[ids]) - data[ids].sum(1, keepdim=True)).square().mean()
    obs.loss(loss, len(ids))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    optimizer.consolidate_state_dict(0)
    if rank == 0:
        kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(kept, file)
    dist.barrier()
obs.close()
dist.destroy_process_group()
"""

_two = partial(
    Twin, script="two.py", text=TWO_NETWORKS, arguments=("{steps}", "{workdir}"), check="resume"
)
_sharded = partial(
    Twin, script="sharded.py", text=SHARDED, arguments=("{steps}", "{workdir}"), check="resume"
)
_RESTORED = "    states.restore(path)\n"
BY_OPTION = """\
# Goes on from a file that its option names, and keeps weights for others in a second file.
import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import entrenar_py

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--output-dir", default="out")
parser.add_argument("--resume", default="", metavar="PATH", help="a checkpoint (last.pt)")
args = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(4)
data = TensorDataset(torch.randn(32, 8), torch.randn(32, 1))
net = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Tanh(), torch.nn.Linear(12, 1))
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.7**epoch)
first = 0
if args.resume:
    kept = torch.load(args.resume, weights_only=True)
    net.load_state_dict(kept["net"])
    optimizer.load_state_dict(kept["optimizer"])
    schedule.load_state_dict(kept["schedule"])
    first = kept["epoch"] + 1
obs = entrenar_py.observe(model, optimizer)
sampler = DistributedSampler(data, seed=6)
loader = DataLoader(data, batch_size=8, sampler=sampler)
for epoch in range(first, args.epochs):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0, error_if_nonfinite=True)
        optimizer.step()
    schedule.step()
    if dist.get_rank() == 0:
        os.makedirs(args.output_dir, exist_ok=True)
        kept = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        kept["schedule"] = schedule.state_dict()
        torch.save(kept, f"{args.output_dir}/last.pt")
        torch.save(net.state_dict(), f"{args.output_dir}/weights.pt")
    dist.barrier()
obs.close()
dist.destroy_process_group()
"""

_itself = partial(Twin, script="itself.py", text=ITSELF, check="resume", changes=())
_LOADED = 'whole.load_state_dict(kept["whole"])'
_OF_WRAPPER = ('"whole": whole.state_dict()', '"whole": model.state_dict()')
_NUMPY = ('"step": step, "h', '"step": __import__("numpy").int64(step), "h')

BUGS = (
    _itself(
        name="a resume at the end of an epoch skips the next one",
        source="verl #7401",
        changes=(('kept["handed_out"] % BATCHES', 'kept["handed_out"]'),),
        words="after the resume other samples are drawn",
    ),
    _itself(
        name="a thread saves live tensors, which the next step changes",
        source="Lightning #20953",
        changes=(("**copied(state)", "**state"),),
        words="its count of steps is",
    ),
    _itself(
        name="the weights that a resume loads have names of the wrapper",
        source="classic (DistributedDataParallel's prefix)",
        changes=(_OF_WRAPPER,),
        words="the script fails to load its checkpoint: RuntimeError: Error(s) in loading",
    ),
    _itself(
        name="a number of numpy's keeps a checkpoint from being loaded",
        source="classic (weights_only=True by default since torch 2.6)",
        changes=(_NUMPY,),
        words="the script fails to load its checkpoint: _pickle.UnpicklingError",
    ),
    _itself(
        name="names that don't fit are passed over, and nothing is loaded",
        source="classic (strict=False)",
        changes=(_OF_WRAPPER, (_LOADED, 'whole.load_state_dict(kept["whole"], strict=False)')),
        words="is as it was before the first step: it was not restored",
    ),
    _itself(
        name="the first layer alone is loaded",
        source="classic (strict=False)",
        changes=(
            (
                _LOADED,
                'first = {k: v for k, v in kept["whole"].items() if k[0] == "0"}\n'
                "    whole.load_state_dict(first, strict=False)",
            ),
        ),
        tensor="2.weight",
        words="is as it was before the first step: it was not restored",
    ),
    _itself(
        name="a resume takes the training for finished",
        source="classic (epochs and steps mixed up)",
        changes=(('step = kept["step"]', 'step = kept["step"] * 8'),),
        verdict="inconclusive",
    ),
    _two(
        name="the second of two optimizers is not in the checkpoint",
        changes=(
            (
                "for_critic=for_critic, decay",
                "for_critic=torch.optim.Adam(critic.parameters()), decay",
            ),
        ),
        step=2,
        rank=0,
        tensor="1.0.weight/step",
        words="is not there any more",
    ),
    _two(
        name="one rank does not restore the second optimizer",
        changes=(
            (
                _RESTORED,
                _RESTORED + "    if rank == 1:\n        for_critic.state.clear()\n",
            ),
        ),
        check="optimizer_state",
        step=2,
        rank=1,
        tensor="1.0.weight/step",
    ),
    _two(
        name="the schedule of the second optimizer is lost",
        changes=(("decay=decay, step=0", "step=0"),),
        words="another learning rate",
        rank=0,
        tensor="1.0.weight",
    ),
    _two(
        name="the stream of batches begins anew",
        changes=(('for _ in range(states["step"]):\n    next(stream)\n', ""),),
        step=2,
        rank=0,
        words="the data starts over",
    ),
    _two(
        name="the stream of batches goes on one batch too far",
        changes=(
            (
                'for _ in range(states["step"]):',
                'for _ in range(states["step"] + (states["step"] > 0)):',
            ),
        ),
        step=2,
        rank=0,
        words="step 2 has the samples of step 3",
    ),
    _sharded(
        name="sharded state is not loaded",
        changes=(('    optimizer.load_state_dict(kept["optimizer"])\n', ""),),
        step=3,
        rank=0,
        tensor="0.weight/step",
        words="it has none, so none was loaded",
    ),
)

OPEN = (
    _itself(name="a script that goes on by itself, from a copy saved in a thread", verdict="held"),
    _itself(
        name="names of the wrapper are taken off before they are loaded",
        changes=(
            _OF_WRAPPER,
            (
                _LOADED,
                _LOADED.replace('kept["whole"]', "{k[7:]: v for k, v in kept['whole'].items()}"),
            ),
        ),
        verdict="held",
    ),
    _itself(
        name="a number of numpy's, in a file that is trusted",
        changes=(
            _NUMPY,
            ('torch.load("last.pt")', 'torch.load("last.pt", weights_only=False)'),
            ('step = kept["step"]', 'step = int(kept["step"])'),
        ),
        verdict="held",
    ),
    _itself(
        name="ranks are given their first weights by a file, in each life",
        changes=(
            (
                "inputs = torch.randn(24, 4)\n",
                "inputs = torch.randn(24, 4)\n"
                "if rank == 0:\n"
                '    torch.save(whole.state_dict(), "first.pt")\n'
                "dist.barrier()\n"
                'whole.load_state_dict(torch.load("first.pt"))\n',
            ),
        ),
        verdict="held",
    ),
    _two(name="two optimizers, stopped and resumed", changes=(), verdict="held"),
    _two(
        name="a script that does not heed {steps}",
        changes=(("int(sys.argv[1])", "8"),),
        verdict="held",
    ),
    _sharded(name="sharded state, stopped and resumed", changes=(), verdict="held"),
)

_by_option = partial(Twin, script="by_option.py", text=BY_OPTION)

BY_ITS_OPTION = (
    _by_option(name="resumed by an option of its own", changes=()),
    _by_option(
        name="an option of another kind: resumed by a flag",
        changes=(
            (
                '"--resume", default="", metavar="PATH", help="a checkpoint (last.pt)"',
                '"--resume", action="store_true"',
            ),
            ("torch.load(args.resume, weights", 'torch.load("out/last.pt", weights'),
        ),
    ),
    _by_option(
        name="resumed by an option, without the optimizer's state",
        changes=(('    optimizer.load_state_dict(kept["optimizer"])\n', ""),),
        check="resume",
        words="none was loaded",
    ),
    _by_option(
        name="resumed by an option, in the epoch that was done",
        changes=(('kept["epoch"] + 1', 'kept["epoch"]'),),
        check="resume",
    ),
    _by_option(
        name="resumed by an option, with a schedule that begins anew",
        changes=(('    schedule.load_state_dict(kept["schedule"])\n', ""),),
        check="resume",
    ),
)
