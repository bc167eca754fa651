"""Scripts that keep state beside the model: averages, best weights, teachers, slow weights.

`make twins` tests that the right ones are left alone, and that each bug is found at its place.
"""

from __future__ import annotations

from falsification.user_trainers import Twin

_HEAD = """\
import copy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(24, 6)
data = TensorDataset(x, x.sin().sum(1, keepdim=True))
sampler = DistributedSampler(data, seed=5)
loader = DataLoader(data, batch_size=8 // world, sampler=sampler)


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 1))


def apply(model, optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e3, error_if_nonfinite=True)
    optimizer.step()
"""

# A trainer with an average: it evaluates it every second step, and saves both after each step.
TRAINER = (
    _HEAD
    + """

class Trainer:
    def __init__(self, steps, folder):
        self.steps, self.path, self.step = steps, Path(folder) / "state.pt", 0
        self.net = network()
        self.ddp = DDP(self.net)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.average = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.8))
        if self.path.exists():
            self.load(torch.load(self.path))

    def load(self, state):
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.average.load_state_dict(state["average"])
        self.step = state["step"]

    def save(self):
        state = {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}
        state |= {"average": self.average.state_dict(), "step": self.step}
        torch.save(state, self.path.with_suffix(".new"))
        self.path.with_suffix(".new").replace(self.path)

    @torch.no_grad()
    def evaluate(self):
        kept = [weight.clone() for weight in self.net.parameters()]
        for weight, other in zip(self.net.parameters(), self.average.parameters()):
            weight.copy_(other)
        F.mse_loss(self.net(x), data.tensors[1])
        for weight, other in zip(self.net.parameters(), kept):
            weight.copy_(other)

    def run(self):
        obs = entrenar_py.observe(self.net, self.optimizer, sampler=loader, step=self.step)
        while self.step < self.steps:
            epoch, done = divmod(self.step, len(loader))
            sampler.set_epoch(epoch)
            for index, (inputs, targets) in enumerate(loader):
                if index < done or self.step == self.steps:
                    continue
                loss = F.mse_loss(self.ddp(inputs), targets)
                obs.loss(loss, len(inputs))
                apply(self.net, self.optimizer, loss)
                self.average.update_parameters(self.net)
                self.step += 1
                if self.step % 2 == 0:
                    self.evaluate()
                if rank == 0:
                    self.save()
                dist.barrier()


Trainer(int(sys.argv[1]), sys.argv[2]).run()
dist.destroy_process_group()
"""
)

# A loop that keeps its best weights, and looks at them every third step.
BEST = (
    _HEAD
    + """
net = network()
ddp = DDP(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
obs = entrenar_py.observe(net, optimizer, sampler=loader)
best, lowest, made = None, float("inf"), 0
for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        loss = F.mse_loss(ddp(inputs), targets)
        obs.loss(loss, len(inputs))
        apply(net, optimizer, loss)
        made += 1
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if made == 2 or float(mean) < lowest / 100:
            best, lowest = copy.deepcopy(net.state_dict()), float(mean)
        if made == 5:
            current = copy.deepcopy(net.state_dict())
            net.load_state_dict(best)
            with torch.no_grad():
                F.mse_loss(net(x), data.tensors[1])
            net.load_state_dict(current)
dist.destroy_process_group()
"""
)

# A student, with a teacher of another form that has normalisations.
TEACHER = (
    _HEAD
    + """

class Distillation(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = network()
        wide = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 1))
        self.teacher = [wide.requires_grad_(False)]  # in a list: it is no part of the state
        self.teacher[0].eval()

    def forward(self, inputs):
        with torch.no_grad():
            due = self.teacher[0](inputs)
        return self.student(inputs), due


model = Distillation()
ddp = DDP(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
obs = entrenar_py.observe(model, optimizer, sampler=loader)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        output, due = ddp(inputs)
        loss = F.mse_loss(output, targets) + F.mse_loss(output, due)
        obs.loss(loss, len(inputs))
        apply(model, optimizer, loss)
dist.destroy_process_group()
"""
)
# Long epochs of a loop in the style of timm: an average with statistics of all ranks, and the best
# weights of both.
WATCHED = (
    _HEAD.replace("batch_size=8 // world", "batch_size=4 // world").replace("24, 6", "48, 6")
    + """
net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 1))
ddp = DDP(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
obs = entrenar_py.observe(ddp, optimizer, sampler=loader)
average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.8))
made = 0


@torch.no_grad()
def validate(module):
    module.eval()
    score = F.mse_loss(module(x), data.tensors[1]).item()
    module.train()
    return score


def distribute_statistics(module):
    for buffer in module.buffers():
        if buffer.is_floating_point():
            dist.all_reduce(buffer)
            buffer /= world


lowest, best = float("inf"), None
for epoch in range(4):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        loss = F.mse_loss(ddp(inputs), targets)
        obs.loss(loss, len(inputs))
        apply(net, optimizer, loss)
        average.update_parameters(net)
        made += 1
        if made % 4 == 0:
            distribute_statistics(average)
    scores = validate(net), validate(average)
    if rank == 0 and scores[1] < lowest:
        lowest, best = scores[1], copy.deepcopy(average.module.state_dict())
        print("best", epoch, scores)
dist.destroy_process_group()
"""
)
_RESUMED = ("{steps}", "{workdir}")
_AFTER = "        F.mse_loss(self.net(x), data.tensors[1])\n"


def _twin(name: str, text: str, *changes: tuple[str, str], **place: object) -> Twin:
    script = {
        TRAINER: "averaged.py",
        BEST: "best.py",
        TEACHER: "teacher.py",
        WATCHED: "watched.py",
    }[text]
    arguments = _RESUMED if text == TRAINER else ()
    return Twin(name=name, script=script, text=text, changes=changes, arguments=arguments, **place)  # type: ignore[arg-type]


BUGS = (
    _twin(
        "an average is left in the model after it was evaluated",
        TRAINER,
        (
            f"{_AFTER}        for weight, other in zip(self.net.parameters(), kept):\n"
            "            weight.copy_(other)\n",
            _AFTER,
        ),
        source="waifu-diffusion #31, Open-Sora-Plan #186",
        check="step_rule",
        step=2,
        words="became what the average average was",
    ),
    _twin(
        "the weights follow their average, not the average the weights",
        TRAINER,
        (
            "                self.average.update_parameters(self.net)\n",
            "                with torch.no_grad():\n"
            "                    pairs = zip(self.net.parameters(), self.average.parameters())\n"
            "                    for weight, other in pairs:\n"
            "                        weight.lerp_(other, 0.2)\n",
        ),
        source="classic (lerp_'s arguments exchanged)",
        check="step_rule",
        words="of the way to average, which stays as it was",
    ),
    _twin(
        "an average's count of updates is not restored",
        TRAINER,
        (
            'self.average.load_state_dict(state["average"])',
            'self.average.load_state_dict(state["average"])\n'
            "        self.average.n_averaged.zero_()",
        ),
        source="lightly-train #892",
        check="resume",
        words="after the resume the average of the weights average is not that",
    ),
    _twin(
        "an average is made anew from the weights that were loaded",
        TRAINER,
        (
            '        self.average.load_state_dict(state["average"])\n',
            "        self.average = AveragedModel(\n"
            "            self.net, multi_avg_fn=get_ema_multi_avg_fn(0.8)\n        )\n",
        ),
        source="pytorch #117742",
        check="resume",
        words="it has the weights with which the run resumed: it was made anew from them",
    ),
    _twin(
        "the best weights are left in the model after they were looked at",
        BEST,
        ("            net.load_state_dict(current)\n", ""),
        source="classic (load_best_model in mid-training)",
        check="step_rule",
        step=5,
        words="became again what it was after step 1, while the optimizer went on",
    ),
    _twin(
        "a teacher in training mode",
        TEACHER,
        ("        self.teacher[0].eval()\n", ""),
        source="classic (a module in a list does not hear train() and eval())",
        check="liveness",
        step=0,
        words="moved, and none of its parameters did: it is in training mode",
    ),
    _twin(
        "rank 0 goes on from the average at the end of a long epoch",
        WATCHED,
        (
            '        print("best", epoch, scores)\n',
            "        net.load_state_dict(best)\n",
        ),
        source="classic (weights swapped in on rank 0, and not back)",
        check="replica_identity",
    ),
    _twin(
        "an average that only rank 0 moves is averaged in with all statistics",
        WATCHED,
        (
            "        average.update_parameters(net)\n",
            "        if rank == 0:\n            average.update_parameters(net)\n",
        ),
        source="classic (timm's distribute_bn with an average of rank 0)",
        check="liveness",
        rank=1,
        words="rank 0 moves the parameters of average, and rank 1 doesn't",
    ),
)

VARIANTS = (
    _twin("an average that is swapped in and out, saved and restored", TRAINER),
    _twin(
        "an average that only rank 0 moves",
        TRAINER,
        (
            "                self.average.update_parameters(self.net)\n",
            "                if rank == 0:\n"
            "                    self.average.update_parameters(self.net)\n",
        ),
    ),
    _twin("the best weights are looked at, and the current ones put back", BEST),
    _twin("an average and its statistics are validated after long epochs", WATCHED),
    _twin(
        "an average that only rank 0 moves, with the statistics of its own",
        WATCHED,
        (
            "        average.update_parameters(net)\n",
            "        if rank == 0:\n            average.update_parameters(net)\n",
        ),
        ("            distribute_statistics(average)\n", "            dist.barrier()\n"),
    ),
    _twin(
        "slow weights take a part of each third step (lookahead)",
        BEST,
        (
            "best, lowest, made = None",
            "slow = [weight.detach().clone() for weight in net.parameters()]\n"
            "best, lowest, made = None",
        ),
        (
            "        mean = loss",
            "        if made % 3 == 0:\n"
            "            with torch.no_grad():\n"
            "                for kept, weight in zip(slow, net.parameters()):\n"
            "                    kept.lerp_(weight, 0.5)\n"
            "                    weight.copy_(kept)\n"
            "        mean = loss",
        ),
    ),
    _twin(
        "weights are held below a bound every third step",
        BEST,
        (
            "        mean = loss",
            "        if made % 3 == 0:\n"
            "            with torch.no_grad():\n"
            "                for weight in net.parameters():\n"
            "                    weight.clamp_(-0.3, 0.3)\n"
            "        mean = loss",
        ),
    ),
    _twin("a teacher in evaluation mode", TEACHER),
)
