"""One rank of a run that torchrun started: from the configuration to the output folder."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from entrenar_py.compute import on_torch
from entrenar_py.shared.errors import BackendUnavailable, EntrenarError, SystemFailure, UsageError
from entrenar_py.shared.scenario import TrainingPlan
from entrenar_py.shared.untrusted import printing
from entrenar_py.train.distill import student
from entrenar_py.train.elastic.group import prepare
from entrenar_py.train.elastic.launcher import seat_of_launcher
from entrenar_py.train.finetune import foresight, outputs, settings_file, task
from entrenar_py.train.finetune.strategies.data_parallel import (
    FullySharded,
    FullyShardedCanonical,
    ddp,
    ddp_canonical,
)
from entrenar_py.train.finetune.strategies.elastic import Elastic, SharedRecord
from entrenar_py.train.finetune.strategies.pipeline_parallel import PipelineParallel
from entrenar_py.train.finetune.strategies.record import Record, State
from entrenar_py.train.finetune.strategies.strategy import Shards, Strategy, together
from entrenar_py.train.finetune.strategies.tensor_parallel import SequenceParallel, TensorParallel
from entrenar_py.train.finetune.strategies.training_loop import Ended, Loop, Scoring
from entrenar_py.train.model import blocks, preparation
from entrenar_py.train.model.preparation import Prepared
from entrenar_py.train.model.settings import BY_SHARDS, Settings
from entrenar_py.train.model.workload import Finetuning
from entrenar_py.train.service import coordinator, exit_codes
from entrenar_py.train.wire.effects import Finish

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

STRATEGIES: Mapping[str, Callable[[Shards], Strategy]] = {
    "ddp": ddp,
    "ddp_canonical": ddp_canonical,
    "fsdp": FullySharded,
    "fsdp_canonical": FullyShardedCanonical,
    "tensor_parallel": TensorParallel,
    "sequence_parallel": SequenceParallel,
    "pipeline_parallel": PipelineParallel,
}


def require_possible(
    strategy: str,
    workload: Finetuning,
    plan: TrainingPlan,
    world_size: int,
    *,
    is_elastic: bool = False,
) -> None:
    """Raise UsageError unless `world_size` ranks can train `workload` with `strategy`."""
    if strategy in BY_SHARDS and world_size > plan.num_shards:
        raise UsageError(
            f"strategy={strategy} with {world_size} ranks: training.num_shards="
            f"{plan.num_shards} leaves ranks without a shard; use num_shards >= {world_size}, "
            "or fewer ranks"
        )
    if strategy == "ddp_canonical" and world_size & (world_size - 1) and not is_elastic:
        raise UsageError(
            f"strategy={strategy} with {world_size} ranks: ranks share a tree evenly; start 1, 2, "
            "4, 8 ... ranks, or set elastic: true"
        )
    if strategy in ("fsdp", "fsdp_canonical"):
        blocks.of(workload.module)
    if strategy in ("tensor_parallel", "sequence_parallel"):
        problem = blocks.problem_of_sharing(workload.module, world_size)
        if problem:
            raise UsageError(
                f"strategy={strategy} with {world_size} ranks: {problem}; use "
                f"{', '.join(BY_SHARDS)} or pipeline_parallel"
            )
    if strategy == "sequence_parallel":
        blocks.of(workload.module)
    if strategy == "pipeline_parallel":
        num_blocks = len(blocks.of(workload.module))
        if num_blocks < world_size:
            raise UsageError(
                f"strategy=pipeline_parallel with {world_size} ranks: the model has {num_blocks} "
                f"blocks, and each rank needs one; use {num_blocks} ranks or fewer"
            )
        if plan.num_shards < world_size:
            raise UsageError(
                f"strategy=pipeline_parallel with {world_size} ranks: training.num_shards="
                f"{plan.num_shards} leaves stages idle; use num_shards >= {world_size}"
            )


_EXAMPLE = "torchrun --nproc_per_node=2 -m entrenar_py.finetune run.yaml"
_TIMEOUT = timedelta(minutes=30)  # of a collective: reading a large model may take long


@dataclass(frozen=True, kw_only=True)
class World:
    """This process's place among the processes of torchrun; `on_host` of them are on this host."""

    rank: int
    local_rank: int
    size: int
    on_host: int
    device: torch.device


def world(environment: Mapping[str, str]) -> World:
    """Return the place that torchrun gave this process, from its environment.

    Raises UsageError without torchrun, and BackendUnavailable if there are too few GPUs.
    """
    if not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= environment.keys():
        raise UsageError(
            f"entrenar_py.finetune is started by torchrun, as in {_EXAMPLE}; without torchrun, use "
            "entrenar finetune run.yaml"
        )
    rank, local_rank = int(environment["RANK"]), int(environment["LOCAL_RANK"])
    on_host = int(environment.get("LOCAL_WORLD_SIZE", environment["WORLD_SIZE"]))
    device = torch.device("cpu")
    if count := torch.cuda.device_count():
        if on_host > count:
            raise BackendUnavailable(
                f"--nproc_per_node={on_host}: ranks need a GPU each, but this machine has "
                f"{count}; use --nproc_per_node={count}, or CUDA_VISIBLE_DEVICES= for CPUs"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    size = int(environment["WORLD_SIZE"])
    return World(rank=rank, local_rank=local_rank, size=size, on_host=on_host, device=device)


@contextmanager
def joined(here: World, init_method: str = "env://") -> Iterator[None]:
    """Join the process group of all ranks: NCCL with GPUs, else gloo. Leave it at the end."""
    dist.init_process_group(
        "nccl" if here.device.type == "cuda" else "gloo",
        init_method=init_method,
        rank=here.rank,
        world_size=here.size,
        timeout=_TIMEOUT,
        device_id=here.device if here.device.type == "cuda" else None,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def train(
    path: Path,
    here: World,
    *,
    resume: bool,
    halt_on_spike: bool = False,
    tensorboard: Path | None = None,
) -> int:
    """Train as one rank, in the process group of all; return the exit code, the same on all ranks.

    `halt_on_spike` and `tensorboard` are as in `service.coordinator.Task`. Raises ContractError,
    UsageError or CheckpointError, the same on all ranks, for a problem found before the run begins.
    """
    prepared, shards = _ready(path, here)
    settings, plan, specs = prepared.settings, shards.plan, shards.workload.specs
    with ExitStack() as stack:
        record, names = None, [("", "")] * here.size
        dist.all_gather_object(names, (str(here.device), _hardware(here.device)))
        if here.rank == 0:
            record = Record(
                *(settings.output, plan, specs),
                backends={rank: name for rank, (name, _) in enumerate(names)},
                hardware=sorted({hardware for _, hardware in names}),
                tensorboard=tensorboard,
            )
            stack.enter_context(closing(record))
        ended = _run(prepared, shards, record, resume=resume, halts_on_spike=halt_on_spike)
        del shards  # their model is cut; the output is written from a whole one
        if record is not None:
            _finish(prepared, plan, record, ended)
    dist.barrier()
    return exit_codes.OF_FINISH[ended.status]


def _ready(path: Path, here: World, store: Store | None = None) -> tuple[Prepared, Shards]:
    """Return what ranks train on. They agree by collectives, or in `store` if one is given."""
    if here.device.type == "cpu":
        torch.set_num_threads(1)  # the number of threads changes the order of sums
    settings = together(lambda: settings_of(path))
    if store is None:
        prepared, free = _prepare(settings, here), _free_bytes(here)
        together(lambda: _look(path, prepared, here, free))
    else:
        day = _first(store, "day", student.day_of(settings))
        prepared = preparation.prepare(settings, day=day)
        free = [] if here.device.type == "cpu" else [torch.cuda.mem_get_info()[0]] * here.size
        _look_first(store, here, lambda: _look(path, prepared, here, free))
    return prepared, _shards(prepared.settings, prepared, here)


def train_elastically(
    path: Path,
    here: World,
    *,
    resume: bool,
    halt_on_spike: bool = False,
    tensorboard: Path | None = None,
) -> int:
    """Train as one rank that others don't wait for if it dies. See `train`, which raises the same.

    Ranks agree in the launcher's store, and not in a process group.
    """
    if here.on_host < here.size:
        raise UsageError(
            f"elastic: true with {here.size} ranks, {here.on_host} of them on this host: any rank "
            "may have to write the output folder; start all on one host, or leave elastic out"
        )
    store, me = seat_of_launcher().store, str(uuid.uuid4())
    prepare(here.device)
    dist.init_process_group(
        "nccl" if here.device.type == "cuda" else "gloo", store=HashStore(), rank=0, world_size=1
    )
    try:
        prepared, shards = _ready(path, here, store)
        record = SharedRecord(
            *(prepared.settings.output, shards.plan, shards.workload.specs),
            backends=dict.fromkeys(range(here.size), here.device.type),
            hardware=[_hardware(here.device)],
            tensorboard=tensorboard,
        )
        settings = [settings_file.to_record(prepared.settings), shards.workload.is_compiled]
        ends = shards.plan.num_steps
        every = prepared.settings.checkpoint_every, prepared.settings.evaluate_every
        strategy = Elastic(
            shards,
            record=record,
            settings=json.dumps(settings, default=str),
            is_followed=lambda made: made >= ends or any(made % steps == 0 for steps in every),
        )
        record.share(
            is_writer=lambda: strategy.is_writer,
            begun=lambda: _is_begun(store, me),
            refuse=partial(_first, store, "unopened"),
            since=partial(_first, store, "since"),
        )
        resume = resume or store.check([_KEY.format("begun")])
        with closing(record):
            outputs.make_folder(prepared)
            state = record.open(resume=resume, is_compiled=shards.workload.is_compiled)
            loop = Loop(
                strategy,
                shards,
                record,
                scoring=Scoring(prepared, strategy, shards),
                save_every=prepared.settings.checkpoint_every,
                halts_on_spike=halt_on_spike,
            )
            ended = loop.run(state, resumes=state is not None)
            while True:
                if record.is_due:
                    _finish(prepared, shards.plan, record, ended)
                    record.written()
                if strategy.close():
                    return exit_codes.OF_FINISH[ended.status]
                loop.begin_record()
                if record.is_due:
                    ended = loop.end()
    finally:
        dist.destroy_process_group()


_KEY = "finetune/{}"  # of the launcher's store


def _first(store: Store, name: str, value: str) -> str:
    """Return the value of the first process that called this function with `name`."""
    return bytes(store.compare_set(_KEY.format(name), "", value)).decode()


def _is_begun(store: Store, me: str) -> bool:
    """Return whether another process has begun the record. Raises UsageError if it couldn't."""
    if store.check([_KEY.format("unopened")]):
        raise UsageError(_first(store, "unopened", ""))
    return _first(store, "begun", me) != me


def _look_first(store: Store, here: World, look: Callable[[], None]) -> None:
    """Let the first rank 0 look. If it refuses the run, raise UsageError on all ranks."""
    if here.rank == 0 and not store.check([_KEY.format("refusal")]):
        try:
            look()
        except EntrenarError as error:
            _first(store, "refusal", str(error))
            raise
        _first(store, "refusal", _NONE)
    store.wait([_KEY.format("refusal")], _TIMEOUT)
    if (refusal := _first(store, "refusal", _NONE)) != _NONE:
        raise UsageError(refusal)


_NONE = "none"


def _hardware(device: torch.device) -> str:
    """Return what computes on `device`, as a worker's backend describes it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return on_torch.open_cpu().device


def _shards(settings: Settings, prepared: Prepared, here: World) -> Shards:
    workload = together(lambda: student.workload(prepared))
    if not here.rank:
        foresight.say_teacher(workload)
        foresight.say_warnings()
    plan = together(lambda: _plan(settings, workload, here))
    together(lambda: _require_attention(workload, here.device))
    return Shards(workload, plan, here.device)


def _require_attention(workload: Finetuning, device: torch.device) -> None:
    try:
        workload.require_attention(device)
    except RuntimeError as error:  # such as OutOfMemoryError, which ends only this rank
        raise SystemFailure(f"attention: cudnn: {error}") from error


def _finish(prepared: Prepared, plan: TrainingPlan, record: Record, ended: Ended) -> None:
    """Export a completed run from a whole model, and write the page of any run."""
    whole = coordinator.Ended(
        finish=Finish(ended.status, ended.reason),
        made=ended.made,
        tensors=ended.tensors,
        digest=record.digest(ended.tensors),
        ledger=record.ledger_end,
        tell=record.tell,
    )
    if ended.status == "completed":
        digest = preparation.model_digest(plan)
        workload = prepared.workload()
        output = outputs.write(prepared, workload, ended.tensors, model_digest=digest)
        printing.say(f"written to {output}")
    task.draw(prepared, plan.num_steps, whole)


def _free_bytes(here: World) -> list[int]:
    """Return the free bytes of each rank's GPU; an empty list for CPUs.

    Reading them opens a context on a GPU, so each rank reads only its own.
    """
    if here.device.type != "cuda":
        return []
    free = [0] * here.size
    dist.all_gather_object(free, torch.cuda.mem_get_info(here.device)[0])
    return free


def _look(path: Path, prepared: Prepared, here: World, free: list[int]) -> None:
    """On rank 0, print what was read, and check hyper-parameters and the memory of all ranks."""
    if here.rank:
        return
    foresight.say_rows(prepared)
    is_gpu = here.device.type == "cuda"
    names = [f"cuda:{index}" for index in range(here.on_host)]
    foresight.look_as_ranks(
        path,
        prepared,
        names=names if is_gpu else ["cpu"],
        num_ranks=here.size,
        num_hosts=-(-here.size // here.on_host),
        free=free,
    )


def is_elastic(path: Path) -> bool:
    """Return whether the configuration at `path` is that of an elastic run.

    Problems of the file are reported by `settings_of`, once all ranks have joined.
    """
    try:
        return settings_file.load(path).elastic
    except (EntrenarError, OSError):
        return False


def settings_of(path: Path) -> Settings:
    """Return the configuration at `path`. Raises UsageError if its strategy needs no torchrun."""
    settings = settings_file.load(path)
    settings_file.require_other(settings, path, "torchrun")
    if settings.strategy is None:
        raise UsageError(
            f"{path}: strategy is missing, which ranks of torchrun need; add one of "
            f"{', '.join(STRATEGIES)}, or use entrenar finetune without torchrun"
        )
    outputs.require_own(settings)
    return settings


def _prepare(settings: Settings, here: World) -> Prepared:
    """Read the rows, first on one rank of each host. The others find them in the cache."""
    days = [student.day_of(settings)]
    dist.broadcast_object_list(days)  # other hosts lack the ledger, and may be past midnight
    prepare = partial(preparation.prepare, settings, day=days[0])
    first = together(lambda: prepare() if here.local_rank == 0 else None)
    return together(lambda: first or prepare())


def _plan(settings: Settings, workload: Finetuning, here: World) -> TrainingPlan:
    plan = preparation.plan_of(settings, workload)
    assert settings.strategy is not None, "it was required"
    require_possible(settings.strategy, workload, plan, here.size, is_elastic=settings.elastic)
    return plan.with_(
        trainer=settings.strategy,
        world_size=here.size,
        backends=("cuda" if here.device.type == "cuda" else "cpu",),
    )


def _run(
    prepared: Prepared,
    shards: Shards,
    record: Record | None,
    *,
    resume: bool,
    halts_on_spike: bool,
) -> Ended:
    def opened() -> State | None:
        if record is None:
            return None
        outputs.make_folder(prepared)
        return record.open(resume=resume, is_compiled=shards.workload.is_compiled)

    # Before the record is opened, so that a refused strategy leaves no ledger behind.
    strategy = together(lambda: STRATEGIES[shards.plan.trainer](shards))
    state = together(opened)
    resumes = [state is not None]
    dist.broadcast_object_list(resumes, 0)
    if shards.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(shards.device)  # loading is not training
    loop = Loop(
        strategy,
        shards,
        record,
        scoring=Scoring(prepared, strategy, shards),
        save_every=prepared.settings.checkpoint_every,
        halts_on_spike=halts_on_spike,
    )
    return loop.run(state, resumes=resumes[0])
