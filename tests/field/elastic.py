"""Kill a rank of other people's elastic scripts: what do they keep, and what do they lose?

`python -m tests.field.elastic [WORDS ...] --clones DIR [--keep DIR] [--record]` runs each script of
`SCRIPTS` undisturbed, and with a rank that is killed in the middle, as F-DP-006 does. The verdict
is printed, and figures that its contract doesn't ask for are computed from the ranks' files:
`Loss`. With `--record` they are written for docs/field.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tests.field import run, sources
from tests.field.recipe import HERE, Edit, Recipe, Trial
from tests.field.recipes import torch_ddp_tutorial, torch_mingpt, torchft

RESULTS = HERE / "results/elastic.json"
CALM, KILLED = "2-workers", "2-workers-killed"
State = tuple[tuple[str, str], ...]  # name and digest of each tensor


@dataclass(frozen=True)
class Life:
    """What one process of a rank did: its first state, and each step's samples and state."""

    rank: int
    life: int
    start: State
    steps: tuple[tuple[tuple[int, ...], State], ...]


@dataclass(frozen=True)
class Loss:
    """What the weights at the end lack, compared with those of the undisturbed run."""

    num_steps: int  # that the undisturbed run makes
    steps_back: int  # made before the kill, and not contained in the weights at the end
    steps_beyond: int  # contained in the weights at the end, more than in the undisturbed run
    samples_lost: int
    samples_again: int
    steps_alone: int  # contained in the weights at the end, made by one rank without the other
    same_weights: bool
    ranks_agree: bool
    pause_s: float


# Torchrun keeps the addresses of ranks that died in the store that it gives to new ones.
_SETTLED = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def _in_small(name: str, recipe: Recipe, *words: str, **changes: Any) -> tuple[Recipe, Trial]:
    """Return a recipe and its first trial with a launcher that starts ranks again."""
    trial = recipe.trials[0]
    command = tuple("--max-restarts=3" if word == "--standalone" else word for word in words)
    options = ("--only", "F-DP-006", "--steps", changes.pop("steps"))
    contracts = ("distributed-training-v1.yaml",)
    environment = {**_SETTLED, **recipe.environment, **changes.pop("environment", {})}
    told = replace(trial, name="auto", command=command, options=options, contracts=contracts)
    told = replace(told, edits=changes.pop("edits", trial.edits))
    return replace(recipe, name=name, environment=environment, **changes), told


_IMAGENET_ON_CPU = (
    Edit(
        "main.py",
        'parser = argparse.ArgumentParser(description="PyTorch Elastic ImageNet Training")',
        add="torch.Tensor.cuda = nn.Module.cuda = lambda self, *_, **__: self\n"
        "torch.cuda.set_device = lambda _: None",
    ),
    Edit(
        "main.py",
        "model = DistributedDataParallel(model, device_ids=[device_id])",
        instead="model = DistributedDataParallel(model)",
    ),
    Edit(
        "main.py",
        'snapshot = torch.load(f, map_location=f"cuda:{device_id}")',
        instead="snapshot = torch.load(f)",
    ),
)


def _pictures(folder: Path) -> None:
    """Write pictures of two classes, in folders as ImageNet's."""
    from PIL import Image

    for part, number in (("train", 12), ("val", 2)):
        for label in (0, 1):
            for index in range(number):
                path = folder / "data" / part / str(label) / f"{index}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (40, 40), (index * 20, label * 200, 100)).save(path)


_IMAGENET = Recipe(
    name="torch-elastic",
    title="torch's elastic example, imagenet",
    repository="pytorch/elastic",
    commit="bc88e6982961d4117e53c4c8163ecf277f35c2c5",
    folder="examples/imagenet",
    needs=("torchvision",),
    data=_pictures,
    trials=(Trial(name="auto", command=(), edits=_IMAGENET_ON_CPU, expected=()),),
)
_TORCHRUN = ("torchrun", "--standalone", "--nproc_per_node={world_size}")
# The tutorial's loss is constant, so that nothing would move: see docs/field.md.
_MOVES = Edit(
    "multigpu_torchrun.py",
    "loss = F.cross_entropy(output, targets)",
    instead="loss = F.mse_loss(output, targets)",
)
_TUTORIAL = torch_ddp_tutorial.RECIPES[0]
_SCRIPT = "multigpu_torchrun.py"
SCRIPTS = (
    _in_small(
        "DDP tutorial, `multigpu_torchrun.py`",
        _TUTORIAL,
        *(*_TORCHRUN, _SCRIPT, "3", "1", "--batch_size", "256"),
        edits=(*_TUTORIAL.trials[0].edits, _MOVES),
        steps="16",
    ),
    _in_small(
        "minGPT-ddp",
        torch_mingpt.RECIPES[0],
        *(*_TORCHRUN, *torch_mingpt.RECIPES[0].trials[0].command[3:-2]),
        *("trainer_config.batch_size=16", "trainer_config.data_loader_workers=0"),
        *("trainer_config.max_epochs=3", "trainer_config.save_every=1"),
        steps="40",
    ),
    _in_small(
        "torch's elastic example, imagenet",
        _IMAGENET,
        *(*_TORCHRUN, "main.py", "data", "--dist-backend", "gloo", "-b", "2", "--epochs", "3"),
        *("--checkpoint-file", "out/checkpoint.pth.tar"),
        steps="30",
    ),
    _in_small(
        "torchft, `train_ddp.py`",
        torchft.RECIPES[0],
        *torchft.RECIPES[0].trials[0].command,
        steps="240",  # the new process is there before the end
        environment={"MIN_REPLICAS": "1"},
    ),
)


# What a reader of the figures wants to know, by name.
WHY = dict(
    zip(
        (recipe.name for recipe, _ in SCRIPTS),
        (
            "A snapshot of the weights after each epoch. It has the index of the last epoch in "
            "place of the number of finished ones, so an epoch is trained twice. (Its constant "
            "loss was replaced by a squared error.)",
            "A snapshot of weights and optimizer after each epoch, but not of the `GradScaler` and "
            "of generators: dropout differs. Unless something seeds it, as the harness does, the "
            "data is split anew, too.",
            "A checkpoint of weights and optimizer after each epoch, which all ranks get from the "
            "one with the latest. Generators are not restored, so crops would differ, but the "
            "pictures here are of one colour.",
            "The group that is left gives up the step, and goes on alone with its next batch when "
            "the other's heartbeats have ended. The new process gets the weights, and begins its "
            "data again; in its first step it adds zeros, and is counted in the mean. (One that "
            "comes after the end of the others trains alone, from the beginning: seen once.)",
        ),
        strict=True,
    )
)


def lives(folder: Path) -> list[Life]:
    """Return what each process in the folder of a run wrote, by rank and life."""
    return [_life(path) for path in sorted(folder.glob("*.rank.jsonl"))]


def _life(path: Path) -> Life:
    rank, life = (int(word) for word in path.name.partition(".")[0].split("-"))
    start: State = ()
    steps = list[tuple[tuple[int, ...], State]]()
    passes = dict[int, list[int]]()
    for line in path.read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        if event["kind"] == "start":
            start = _state(event)
        elif event["kind"] == "shard":
            passes[event["shard"]] = event["ids"] or []
        elif event["kind"] == "update":
            # A pass that was given up before is no term of the gradient.
            terms = {term for each in event.get("summed", {}).values() for term in each}
            kept = [ids for shard, ids in passes.items() if not terms or shard in terms]
            steps.append((tuple(each for ids in kept for each in ids), _state(event)))
            passes.clear()
    return Life(rank, life, start, tuple(steps))


def _state(event: Mapping[str, Any]) -> State:
    return tuple(sorted((name, value[0]) for name, value in event["weights"].items()))


def history(found: Sequence[Life], last: Life) -> list[tuple[Life, int]]:
    """Return the steps that the weights at the end of `last` contain, in order.

    The state with which a life begins is that of a step of an earlier one, or of none: then it
    began anew. A state that its first step replaces (torchft's) is not seen, so the step before
    its first one is that of the others.
    """
    own = [(last, index) for index in range(len(last.steps))]
    for other in sorted(found, key=lambda one: -one.life):
        for index in reversed(range(len(other.steps))):
            if other.life < last.life and other.steps[index][1] == last.start:
                return [*history(found, other)[: index + 1], *own]
    return own


def loss(calm: Sequence[Life], killed: Sequence[Life], pause_s: float) -> Loss:
    """Compare the run in which a rank was killed with the undisturbed one."""
    lasts = {one.rank: one for one in sorted(killed, key=lambda one: one.life) if one.steps}
    ends = {one.steps[-1][1] for one in lasts.values()}
    last = lasts[0]
    contained = history(killed, last)
    groups = [_together(killed, life, index) for life, index in contained]
    usual = Counter(each for one in calm for ids, _ in one.steps for each in ids)
    got = Counter(each for group in groups for ids in group for each in ids)
    num_steps = len(calm[0].steps)
    first = next(one for one in killed if one.rank == 0 and one.life == 0)
    kept = sum(life is first for life, _ in contained)
    return Loss(
        num_steps=num_steps,
        steps_back=len(first.steps) - kept if last is not first else 0,
        steps_beyond=len(contained) - num_steps,
        samples_lost=(usual - got).total(),
        samples_again=(got - usual).total(),
        steps_alone=sum(len(group) == 1 for group in groups),
        same_weights=ends == {calm[0].steps[-1][1]},
        ranks_agree=len(ends) == 1,
        pause_s=pause_s,
    )


def _together(found: Sequence[Life], life: Life, index: int) -> list[tuple[int, ...]]:
    """Return the samples of each rank that made a step with the same result."""
    ids, state = life.steps[index]
    # A step that moves nothing, such as a GradScaler's first ones, has the state of the one before.
    peers = [
        ((other.life != life.life, abs(place - index)), samples)
        for other in found
        if other.rank != life.rank
        for place, (samples, result) in enumerate(other.steps)
        if result == state
    ]
    return [ids, min(peers)[1]] if peers else [ids]


class Clock(threading.Thread):
    """Measures the longest time without a step of rank 0 after the kill, in all of its lives."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self._folder, self.is_over = folder, threading.Event()
        self.pause_s = 0.0

    def run(self) -> None:
        """Watch the ranks' files, a hundred times a second."""
        killed, last, before = self._folder / "00001-000.rank.jsonl", 0.0, 0
        while not self.is_over.wait(0.01):
            steps = sum(_num(path, "update") for path in self._folder.glob("00000-*.rank.jsonl"))
            if not last and killed.exists() and _num(killed, "injected"):
                last, before = time.monotonic(), steps
            elif last and steps > before:
                now = time.monotonic()
                self.pause_s, last = max(self.pause_s, round(now - last, 1)), now
                before = steps


def _num(path: Path, kind: str) -> int:
    return path.read_text("utf-8").replace(": ", ":").count(f'{{"kind":"{kind}"')


def tried(recipe: Recipe, trial: Trial, kept: Path, clones: Path | None) -> dict[str, Any]:
    """Run a script undisturbed and with a kill; return its verdict and what it loses."""
    root = kept / recipe.name.replace("/", "-").replace(" ", "-")
    shutil.rmtree(root, ignore_errors=True)
    folder = sources.place(recipe, trial, root / "script", clones=clones)
    (root / "reports").mkdir()
    traces = root / "reports/distributed-training-v1"
    clock = Clock(traces / KILLED)
    clock.start()
    outcome = run.judged(recipe, trial, folder, root / "reports", "")
    clock.is_over.set()
    clock.join()
    found = loss(lives(traces / CALM), lives(traces / KILLED), clock.pause_s)
    return {
        "repository": recipe.repository,
        "commit": recipe.commit,
        "address": recipe.address,
        "command": " ".join(trial.command),
        "versions": sources.versions(recipe),
        "verdict": outcome["clauses"]["F-DP-006"],
        **asdict(found),
    }


def main(words: Sequence[str]) -> int:
    """Try the scripts whose names have one of the words, or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.field.elastic")
    parser.add_argument("words", nargs="*")
    parser.add_argument("--clones", type=Path)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args(words)
    kept = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        for recipe, trial in _chosen(options.words):
            found = tried(recipe, trial, options.keep or Path(folder), options.clones)
            print(recipe.name, json.dumps(found, indent=1), flush=True)
            kept[recipe.name] = found
    if options.record:
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return 0


def _chosen(words: Sequence[str]) -> Iterator[tuple[Recipe, Trial]]:
    for recipe, trial in SCRIPTS:
        if not words or any(word in recipe.name for word in words):
            yield recipe, trial


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
