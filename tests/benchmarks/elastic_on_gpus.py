"""Ranks on GPUs are killed in the middle of a run: how long until the others go on, and the bits.

    python tests/benchmarks/elastic_on_gpus.py --gpus 2 --kills 50 --pace-s 1

Trains a transformer of 0.6 billion parameters in bfloat16 with AdamW, or a small one over gloo if
there is no GPU. Prints as JSON:

- `speed`: a step without faults, of elastic training, of the canonical all-reduce and of stock
  DistributedDataParallel, by turns in the same processes;
- `elastic`: the digest of a run in which a rank is killed again and again, each time when the last
  one has been replaced, and the seconds from a kill to the next commit and to the newcomer's first;
- `alone`: the digest of one undisturbed GPU after as many steps;
- `restart`: the same for torchrun, which starts all ranks again from a checkpoint;
- `torchft`: the same for torchft, with a replica group for each GPU.

With `--every-s 60`, `elastic` and `torchft` also have `goodput`: the new steps from the first kill
to a minute after the last one, or the end, beside those that undisturbed ranks make in that time.

CI does not run it. `torchft` needs the package of that name.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

ON_GPUS = torch.cuda.is_available()
MICRO_BATCHES, VOCAB = 4, 50304 if ON_GPUS else 512
SMALL, LARGE = (1, 512 if ON_GPUS else 64), (8, 1024)  # rows and tokens of a micro-batch
MOMENTS = ("forward", "backward", "exchange", "optimizer")
SAVED_EVERY, RESTARTS = 20, 2  # steps between checkpoints; kills of the run that restarts


class Block(nn.Module):
    """A layer of the transformer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's result [rows, tokens, width]."""
        rows, tokens, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(rows, tokens, 3, self.heads, -1)
        q, k, v = (one.transpose(1, 2) for one in parts.unbind(2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, tokens, width))
        out: Tensor = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return out


class Transformer(nn.Module):
    """A decoder of 0.6 billion parameters, or a small one."""

    def __init__(self, *, small: bool) -> None:
        super().__init__()
        width, layers, heads = (64, 2, 2) if small else (1280, 25, 10)
        self.embedding = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of the next tokens."""
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        scores = self.head(self.norm(x)).flatten(0, 1)
        return F.cross_entropy(scores, tokens[:, 1:].flatten())


def build(device: torch.device) -> tuple[Transformer, torch.optim.Optimizer]:
    """Return the model and its optimizer, the same on all ranks."""
    torch.manual_seed(0)
    with device:
        model = Transformer(small=device.type == "cpu").to(torch.bfloat16)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")


def batches(step: int, device: torch.device, size: tuple[int, int] = SMALL) -> list[Tensor]:
    """Return the micro-batches of a step, each [rows, tokens + 1]."""
    draws = torch.Generator().manual_seed(step)
    shape = (MICRO_BATCHES, size[0], size[1] + 1)
    return [*torch.randint(VOCAB, shape, generator=draws).to(device)]


def digest(model: nn.Module) -> str:
    """Return a digest of the weights."""
    found = hashlib.sha256()
    for one in model.parameters():
        found.update(one.detach().cpu().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


class Log:
    """What happened when, in a file of this process. Kills the process when it is its turn.

    A rank is killed when all ranks have made two steps together: number n at the n-th moment.
    """

    def __init__(self, folder: Path, kills: int, world_size: int, every_s: float = 0.0) -> None:
        self._folder, self._kills, self._world_size = folder, kills, world_size
        self._every_s = every_s
        self._file = (folder / f"{os.getpid()}.jsonl").open("a", buffering=1)
        self._seat = int(os.environ.get("RANK", "0"))
        self._since, self._armed = 0, ""

    def __call__(self, what: str, **facts: Any) -> None:
        """Write a line."""
        print(json.dumps({"what": what, "time": time.time(), **facts}), file=self._file)

    def arm(self, step: int, world_size: int) -> None:
        """Decide whether this process is killed in `step`."""
        self._armed = ""
        if world_size < self._world_size:
            self._since = step + 1
        killed = [file.stat().st_mtime for file in self._folder.glob("kill.*")]
        number = len(killed)
        if (
            number < self._kills
            and time.time() >= max(killed, default=0.0) + self._every_s
            and step >= self._since + 2
            and not self._folder.joinpath("last").exists()
            and number % self._world_size == self._seat
        ):
            self._armed = MOMENTS[number // self._world_size % len(MOMENTS)]
            self._number = number

    def passes(self, moment: str) -> None:
        """Kill this process if it is time."""
        if moment == self._armed:
            (self._folder / f"kill.{self._number}").touch()
            self("kill", number=self._number, moment=moment)
            os.kill(os.getpid(), signal.SIGKILL)


def device_of_rank() -> torch.device:
    """Return this rank's GPU, or the CPU without GPUs."""
    if not ON_GPUS:
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def train(given: argparse.Namespace) -> None:
    """Train elastically."""
    import entrenar_py

    log = Log(given.folder, given.kills, int(os.environ.get("WORLD_SIZE", "1")), given.every_s)
    log("started")
    device = device_of_rank()
    model, optimizer = build(device)
    log("model made")
    trainer = entrenar_py.elastic(
        model, optimizer, micro_batches=MICRO_BATCHES, deadline_s=given.deadline_s
    )
    log("joined", step=trainer.step, world_size=trainer.world_size)

    def exchanging(_: Tensor) -> None:
        """Pass the moment in which the last gradient of the step is there: all exchanges go on."""
        if trainer.shard == trainer.shards[-1]:
            log.passes("exchange")

    hooked: list[Any] = [model.embedding.weight, next(model.blocks[1].parameters())]
    hooked[0].register_post_accumulate_grad_hook(exchanging)
    hooked[1].register_hook(lambda _: log.passes("backward"))
    optimizer.register_step_pre_hook(lambda *_: log.passes("optimizer"))
    latest, last = -1, given.folder / "last"
    for step in trainer.steps(given.steps):
        if last.exists() and step == int(last.read_text(encoding="utf-8")):
            break  # all ranks at once, as nobody is killed any more
        if step != latest:
            time.sleep(given.pace_s)
        latest = step
        log.arm(step, trainer.world_size)
        for batch in trainer.fold(batches(step, device)):
            loss = model(batch)
            log.passes("forward")
            loss.backward()
        if trainer.commit():
            if given.log_synchronised and device.type == "cuda":
                torch.cuda.synchronize()
            log("commit", step=step, world_size=trainer.world_size)
        else:
            log("repeat", step=step, world_size=trainer.world_size)
    log("end", digest=digest(model), step=trainer.step)


def torchft(given: argparse.Namespace) -> None:
    """Train with torchft, as its train_ddp.py does. This process is one of its replica groups.

    A group has the same micro-batches in each step, so those of a dead group are left out.
    """
    from datetime import timedelta

    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torchft import (
        DistributedDataParallel,
        Manager,
        Optimizer,
        ProcessGroupGloo,
        ProcessGroupNCCL,
    )
    from torchft.checkpointing.pg_transport import PGTransport

    seat, num_seats = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    log = Log(given.folder, given.kills, num_seats, given.every_s)
    device = device_of_rank()
    model, plain = build(device)
    kind = ProcessGroupNCCL if device.type == "cuda" else ProcessGroupGloo
    group = kind(timeout=timedelta(seconds=given.deadline_s))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=group,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": plain.state_dict()},
        min_replica_size=1,
        replica_id=f"group_{seat}",
        timeout=timedelta(seconds=30),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
        checkpoint_transport=PGTransport(group, timeout=timedelta(seconds=30), device=device),
        init_sync=False,  # the weights are the same on all ranks
    )
    ddp = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, plain)
    share, last = MICRO_BATCHES // num_seats, given.folder / "last"
    is_last, present = False, 0
    hooked: list[Any] = [model.embedding.weight, next(model.blocks[1].parameters())]
    hooked[0].register_post_accumulate_grad_hook(
        lambda _: log.passes("exchange") if is_last else None
    )
    hooked[1].register_hook(lambda _: log.passes("backward"))
    log("joined", step=manager.current_step())
    while not (last.exists() and manager.current_step() >= int(last.read_text(encoding="utf-8"))):
        time.sleep(given.pace_s)
        step = manager.current_step()
        optimizer.zero_grad()
        log.arm(step, present)
        mine = batches(step, device)[seat * share :][:share]
        for number, batch in enumerate(mine):
            is_last = number == share - 1
            with nullcontext() if is_last else ddp.no_sync():
                loss = ddp(batch)
                log.passes("forward")
                loss.backward()
        log.passes("optimizer")
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        is_committed = manager.current_step() > step
        # Nobody is killed in the step that brings a newcomer up, or in the next two.
        present = manager.num_participants() if manager.current_step() == step + 1 else 0
        # A newcomer's first step is that of the others.
        log(
            "commit" if is_committed else "repeat",
            step=manager.current_step() - is_committed,
            world_size=manager.num_participants(),
        )
    log("end", digest=digest(model), step=manager.current_step())
    manager.shutdown(wait=False)


def restart(given: argparse.Namespace) -> None:
    """Train with the canonical all-reduce, from the last checkpoint."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import entrenar_py

    device = device_of_rank()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank = dist.get_rank()
    log = Log(given.folder, RESTARTS, dist.get_world_size())
    model, optimizer = build(device)
    first, file = 0, given.folder / "checkpoint.pt"
    if file.exists():
        state = torch.load(file, map_location=device, mmap=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
        del state
    ddp = DistributedDataParallel(model)
    reducer = entrenar_py.canonical_all_reduce(ddp, micro_batches=MICRO_BATCHES)
    log("joined", step=first)
    for step in range(first, 4 * SAVED_EVERY):
        kills = len([*given.folder.glob("kill.*")])
        if rank == 1 and kills < RESTARTS and step == kills * SAVED_EVERY + SAVED_EVERY // 2:
            log._armed, log._number = "backward", kills
        mine = batches(step, device)
        for batch in reducer.fold([mine[shard] for shard in reducer.shards]):
            loss = ddp(batch)
            log.passes("backward")
            loss.backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        log("commit", step=step, world_size=dist.get_world_size())
        if (step + 1) % SAVED_EVERY == 0 and rank == 0:
            parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**parts, "step": step + 1}, given.folder / "new.pt")
            (given.folder / "new.pt").rename(file)
            log("saved", step=step)
    log("end", digest=digest(model), step=step + 1)
    dist.destroy_process_group()


def speed(given: argparse.Namespace) -> None:
    """Time steps of the three kinds of data parallelism, by turns."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import entrenar_py

    device = device_of_rank()
    models = [build(device) for _ in range(3)]
    trainer = entrenar_py.elastic(*models[0], micro_batches=MICRO_BATCHES)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    wrapped = DistributedDataParallel(models[1][0])
    reducer = entrenar_py.canonical_all_reduce(wrapped, micro_batches=MICRO_BATCHES)
    stock = DistributedDataParallel(models[2][0])
    steps = trainer.steps(10**9)
    share = MICRO_BATCHES // dist.get_world_size()

    def elastic(rows: list[Tensor], _: list[Tensor]) -> None:
        next(steps)
        for batch in trainer.fold(rows):
            models[0][0](batch).backward()
        assert trainer.commit()

    def canonical(_: list[Tensor], mine: list[Tensor]) -> None:
        for batch in reducer.fold(mine):
            wrapped(batch).backward()
        models[1][1].step()
        models[1][1].zero_grad()

    def ddp(_: list[Tensor], mine: list[Tensor]) -> None:
        with stock.no_sync():
            for batch in mine[:-1]:
                stock(batch).backward()
        stock(mine[-1]).backward()
        models[2][1].step()
        models[2][1].zero_grad()

    kinds: dict[str, Callable[[list[Tensor], list[Tensor]], None]] = {
        "elastic": elastic,
        "canonical": canonical,
        "ddp": ddp,
    }
    found: dict[str, Any] = {}
    for size in (SMALL, LARGE) if device.type == "cuda" else (SMALL,):
        rows = batches(0, device, size)
        mine = rows[dist.get_rank() * share :][:share]
        times: dict[str, list[float]] = {name: [] for name in kinds}
        for turn in range(given.rounds + 1):
            for name, kind in kinds.items():
                dist.barrier()
                began = time.perf_counter()
                for _ in range(10):
                    kind(rows, mine)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                if turn:
                    times[name].append(1e2 * (time.perf_counter() - began))
        found["{} x {}".format(*size)] = {
            name: {"median_ms": round(median(one), 1), "fastest_ms": round(min(one), 1)}
            for name, one in times.items()
        }
    found["same_bits"] = digest(models[0][0]) == digest(models[1][0])
    if dist.get_rank() == 0:
        (given.folder / "speed.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


ROLES = {"train": train, "restart": restart, "speed": speed, "torchft": torchft}


def launch(given: argparse.Namespace, role: str, gpus: int, *launcher: str) -> Path:
    """Run a role of this script, and return the folder of its logs."""
    folder = Path(tempfile.mkdtemp(prefix=f"elastic-{role}-"))
    command = [sys.executable]
    if gpus > 1 and role != "torchft":
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={gpus}"]
        command += launcher
    options = [__file__, f"--role={role}", f"--folder={folder}", f"--steps={given.steps}"]
    options += [f"--rounds={given.rounds}", f"--deadline-s={given.deadline_s}"]
    has_kills = role == "torchft" or (bool(launcher) and role == "train")
    options += [f"--kills={given.kills if has_kills else 0}", f"--every-s={given.every_s}"]
    if has_kills:
        options += [f"--pace-s={given.pace_s}", "--log-synchronised"]
    settings = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "1"}
    if role == "restart":  # or new ranks find the addresses of the dead (pytorch#135712)
        settings["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"

    def start(more: dict[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*command, *options], env={**os.environ, **settings, **more}, stdout=sys.stderr
        )

    if role == "torchft":
        lighthouse, address = start_lighthouse(given)
        settings |= {"TORCHFT_LIGHTHOUSE": address, "WORLD_SIZE": str(gpus)}
        environments = [{"RANK": str(seat), "LOCAL_RANK": str(seat)} for seat in range(gpus)]
    else:
        lighthouse, environments = None, [dict[str, str]()]
    running = [start(environment) for environment in environments]
    end = time.time() + given.limit_s
    while any(one.poll() is None for one in running):
        time.sleep(0.1)
        if role == "torchft":  # it leaves restarts to whoever started its groups
            running = [
                start(environment) if one.poll() else one
                for one, environment in zip(running, environments, strict=True)
            ]
        if not has_kills or (folder / "last").exists():
            continue
        lines = events(folder)
        kills = [line["time"] for line in lines if line["what"] == "kill"]
        joins = [line["time"] for line in lines if line["what"] == "joined"]
        steps = [line["step"] for line in lines if line["what"] == "commit"]
        latest = max(kills, default=0.0)
        done = len(kills) == given.kills and max(joins, default=0.0) > latest
        if steps and (time.time() > end or (done and time.time() > latest + given.every_s)):
            (folder / "new").write_text(str(max(steps) + 5), encoding="utf-8")
            (folder / "new").rename(folder / "last")
    if lighthouse is not None:
        lighthouse.kill()
    for one in running:
        if one.returncode:
            print(json.dumps({"role": role, "failed": one.returncode}), flush=True)
    return folder


def start_lighthouse(given: argparse.Namespace) -> tuple[subprocess.Popen[bytes], str]:
    """Start what torchft's groups agree over. Returns it and its address."""
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        port = taken.getsockname()[1]
    options = [f"--bind=[::]:{port}", *given.lighthouse.split()]
    process = subprocess.Popen(["torchft_lighthouse", *options], stdout=sys.stderr)
    return process, f"http://localhost:{port}"


def events(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of all logs, in order of time, each with its process."""
    lines = [
        {**json.loads(line), "process": file.stem}
        for file in folder.glob("*.jsonl")
        for line in file.read_text(encoding="utf-8").splitlines()
    ]
    return sorted(lines, key=lambda line: line["time"])


@dataclass(frozen=True)
class Kill:
    """A kill, and the seconds to the next commit of a new step and to the newcomer's first."""

    moment: str
    next_commit_s: float
    newcomer_s: float


def kills_in(lines: Sequence[dict[str, Any]]) -> Iterator[Kill]:
    """Yield what followed each kill."""
    for kill in [line for line in lines if line["what"] == "kill"]:
        later = [one for one in lines if one["time"] > kill["time"] and one["what"] == "commit"]
        before = {one["process"] for one in lines if one["time"] < kill["time"]}
        news = [one["time"] for one in later if one["process"] not in before]
        # What was committed before doesn't count: a run that restarts repeats it.
        done = max(
            (
                one["step"]
                for one in lines
                if one["what"] == "commit" and one["time"] < kill["time"]
            ),
            default=-1,
        )
        progress = [one["time"] for one in later if one["step"] > done]
        if progress and news:
            yield Kill(kill["moment"], progress[0] - kill["time"], news[0] - kill["time"])


def summary(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what is known of a run."""
    kills = [*kills_in(lines)]
    found: dict[str, Any] = {
        "ends": sorted({(one["step"], one["digest"]) for one in lines if one["what"] == "end"}),
        "kills": len([line for line in lines if line["what"] == "kill"]),
        "repeats": len([line for line in lines if line["what"] == "repeat"]),
    }
    for name, waits in (
        ("next_commit_s", [kill.next_commit_s for kill in kills]),
        ("newcomer_s", [kill.newcomer_s for kill in kills]),
    ):
        times = sorted(waits)
        if len(times) > 1:
            found[name] = {
                "median": round(median(times), 3),
                "p99": round(quantiles(times, n=100, method="inclusive")[98], 3),
                "most": round(times[-1], 3),
            }
    for moment in MOMENTS:
        found[moment] = [round(one.next_commit_s, 2) for one in kills if one.moment == moment]
    return found


def goodput(lines: Sequence[dict[str, Any]], every_s: float) -> dict[str, float]:
    """Return how much of the undisturbed throughput was left from the first kill on.

    Undisturbed are steps of as many ranks as before the first kill. Steps count once.
    """
    kills = [line["time"] for line in lines if line["what"] == "kill"]
    latest = max(line["time"] for line in lines if line["what"] == "commit")
    begin, end = kills[0], min(kills[-1] + every_s, latest)
    first: dict[int, dict[str, Any]] = {}  # commit of each step
    for line in lines:
        if line["what"] == "commit":
            first.setdefault(line["step"], line)
    times = [(one["time"], one["world_size"]) for one in first.values()]
    whole = next(size for when, size in reversed(times) if when < begin)
    gaps = [
        later[0] - sooner[0]
        for sooner, later in pairwise(times)
        if sooner[1] == later[1] == whole
        and not any(sooner[0] <= kill <= later[0] for kill in kills)
    ]
    made = len([when for when, _ in times if begin < when <= end])
    return {
        "kills": len(kills),
        "seconds": round(end - begin, 1),
        "step_ms": round(1e3 * median(gaps), 1),
        "share": round(made * median(gaps) / (end - begin), 3),
    }


def main() -> None:
    """Measure all parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10**6, help="of `alone` without `elastic`")
    parser.add_argument("--limit-s", type=float, default=1e6, help="no kill after that")
    parser.add_argument("--pace-s", type=float, default=0.0, help="a pause before each step")
    parser.add_argument("--deadline-s", type=float, default=30.0)
    parser.add_argument(
        "--every-s", type=float, default=0.0, help="the least time between two kills"
    )
    parser.add_argument(
        "--lighthouse",
        default="--min_replicas=1 --quorum_tick_ms=100 --join_timeout_ms=10000",
        help="options of torchft's (default: those of its README)",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", default="speed,elastic,alone,restart")
    parser.add_argument("--role", choices=ROLES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--log-synchronised", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.role:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        ROLES[given.role](given)
        return
    supervised = ("-m", "entrenar_py.supervise", "--max-restarts", "1000")
    for part in given.parts.split(","):
        began = time.time()
        if part == "speed":
            folder = launch(given, "speed", given.gpus)
            found = json.loads((folder / "speed.json").read_text(encoding="utf-8"))
        elif part == "alone":
            folder = launch(given, "train", 1)
            found = summary(events(folder))
        elif part == "elastic":
            folder = launch(given, "train", given.gpus, *supervised)
            found = summary(events(folder))
            given.steps = found["ends"][0][0]
        elif part == "torchft":
            folder = launch(given, "torchft", given.gpus)
            found = summary(events(folder))
        else:
            folder = launch(given, "restart", given.gpus, f"--max-restarts={RESTARTS}")
            found = summary(events(folder))
        if given.every_s and part in ("elastic", "torchft"):
            found["goodput"] = goodput(events(folder), given.every_s)
        print(
            json.dumps({"part": part, "took_s": round(time.time() - began, 1), **found}), flush=True
        )
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
