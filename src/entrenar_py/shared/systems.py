"""The table of systems: their names, and what a scenario may request from each.

A system is what the harness runs: a trainer or a probe. Their code is elsewhere:
`entrenar_py.systems` finds the module of a system by its name, so that the harness can plan runs
without loading a trainer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from entrenar_py.shared import faults, trace, workers
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.faults import ELASTIC_PLACES, PIPELINE_PLACES, PLACES, RING_PLACES, Fault
from entrenar_py.shared.scenario import (
    BACKENDS,
    DEFAULTS,
    Scenario,
    TrainingPlan,
    backend_kind,
    backends_in_words,
)
from entrenar_py.shared.trace import Traits
from entrenar_py.shared.trace.traits import USUAL

# The backend name that makes a trainer use the first working backend of the fallback chain.
AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class System:
    """One system: its module, its description, and what a scenario may request from it.

    - `room`: the package below `entrenar_py` with its module, or the module if it has two dots.
    - `what`: its description.
    - `faults`: the kinds of faults that it can inject.
    - `places`: the messages at which a fault can strike.
    - `options`: the options that it accepts.
    - `only`: the names of the backends that it accepts; empty if it accepts all.
    - `in_step`: false if each worker takes some steps without the others. Clauses on steps that all
      workers take together then do not apply.
    - `bitwise`: false if the bits depend on the number of workers. No clause then requires equal
      bits.
    - `powers_of_two`: whether the numbers of workers and of micro-batches must be powers of two.
    - `traits`: the traits of each of its runs.
    """

    room: str
    what: str
    faults: tuple[str, ...] = ()
    places: tuple[str, ...] = PLACES
    options: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    in_step: bool = True
    bitwise: bool = True
    powers_of_two: bool = False
    traits: Traits = USUAL

    @property
    def is_probe(self) -> bool:
        """True if the system tests one thing, and trains no workload."""
        return self.room.startswith("systems.probes")

    @property
    def trains(self) -> bool:
        """True if the system trains the scenario's workload, not a workload of its own."""
        return not self.is_probe and not self.room.startswith("systems.finetuned")

    @property
    def backends(self) -> tuple[str, ...]:
        """The kinds of backend that a scenario may name for this system."""
        if self.only:
            return self.only
        return (*BACKENDS, AUTO) if self.trains else BACKENDS

    def require_backend(self, name: str, where: str) -> None:
        """Raise UsageError unless a scenario may name the backend `name` for this system."""
        kind = name if name in self.backends or self.only else name.partition(":")[0]
        if kind not in self.backends:
            names = ", ".join(self.only) or backends_in_words(self.backends)
            raise UsageError(f"backend={name!r}{where}: allowed are {names}")
        if kind != AUTO:
            backend_kind(name)


TUNED = (
    *("task", "method", "family", "rank", "alpha", "class_weights", "oversample", "blocks"),
    "marks",
)
# Options of systems in which the trainer itself fine-tunes. The last two are for preference pairs.
OWN = (*TUNED, "facts", "recompute", "beta", "label_smoothing")
BY_RANKS = (*TUNED, "strategy")
# Options that say which part of the model each worker has.
_PARTS = ("cuts",)
DISTILLED = (*TUNED, "packing", "facts", "top_k", "temperature", "share")
STAGED = (*OWN, *_PARTS, "network_seed")

_TERMS = "terms"  # an option of the workload `vectors`
_REAL_OPTIONS = (
    *("heartbeat_s", "dead_after_s", "deadline_s", "block_bytes", "socket_bytes"),
    _TERMS,
)
_VALUE_FAULTS = ("non_finite_gradient", "non_finite_loss", "huge_gradient")
_TRAINING_FAULTS = (*_VALUE_FAULTS, "leave", "join")
_FAULTS = (*_TRAINING_FAULTS, *faults.ON_THE_WAY, "lie", "stranger", "restart")
_STAR, _MESH, _RING = (Traits(topology=one, masks="shard") for one in ("star", "mesh", "ring"))
# Common to all trainers over torch.distributed, with gloo or NCCL.
_OVER_TORCH = System(
    room="systems.torch",
    what="",
    faults=_TRAINING_FAULTS,
    options=("deadline_s",),
    only=("cpu", "cuda"),
    bitwise=False,
)

# The systems by name. `run` is in the module of that name in `room`, unless `room` is a module.
SYSTEMS: dict[str, System] = {
    "reference": System(
        room="systems",
        what="the deterministic data-parallel trainer, all workers in this process",
        faults=_TRAINING_FAULTS,
        options=(_TERMS,),
        traits=Traits(masks="shard"),
    ),
    "textbook": System(
        room="systems",
        what="a plain torch data-parallel loop, independent of the reference",
        faults=_TRAINING_FAULTS,
        bitwise=False,
    ),
    "parameter_server": System(
        room="systems.star.processes",
        what="a parameter server over TCP, each worker a process of its own",
        faults=(*_FAULTS, *faults.SILENT),
        options=(*_REAL_OPTIONS, "audit_share", "updates"),
        traits=_STAR,
    ),
    "parameter_server_simulated": System(
        room="systems.star.simulation",
        what="a parameter server and its workers, under a seeded simulator of network and time",
        faults=(*_FAULTS, *faults.SILENT),
        options=("block_bytes", "network_seed", "audit_share", "updates", _TERMS),
        traits=_STAR,
    ),
    "mesh": System(
        room="systems.star.processes",
        what="workers that exchange blocks with each other over TCP, each a process of its own",
        faults=_FAULTS,
        options=_REAL_OPTIONS,
        traits=_MESH,
    ),
    "mesh_simulated": System(
        room="systems.star.simulation",
        what="workers that exchange blocks with each other, under the same simulator",
        faults=_FAULTS,
        options=("block_bytes", "network_seed", _TERMS),
        traits=_MESH,
    ),
    "ring": System(
        room="systems.star.processes",
        what="workers that send blocks around a ring over TCP, each a process of its own",
        faults=_FAULTS,
        places=RING_PLACES,
        options=_REAL_OPTIONS,
        traits=_RING,
    ),
    "ring_simulated": System(
        room="systems.star.simulation",
        what="workers that send blocks around a ring, under the same simulator",
        faults=_FAULTS,
        places=RING_PLACES,
        options=("block_bytes", "network_seed", _TERMS),
        traits=_RING,
    ),
    "ddp": replace(
        _OVER_TORCH,
        what="torch's DistributedDataParallel, each rank a process of its own",
    ),
    "tensor_parallel": replace(
        _OVER_TORCH,
        what="layers sharded over ranks by torch's parallelize_module; groups of ranks "
        "are data-parallel",
        options=("deadline_s", "tp"),
    ),
    "sequence_parallel": replace(
        _OVER_TORCH,
        room="systems.torch.tensor_parallel",
        what="tensor parallelism in which each rank has a part of each sequence between the layers",
        options=("deadline_s", "tp"),
    ),
    "pipeline_parallel": replace(
        _OVER_TORCH,
        what="layers in stages of one rank each, by torch's pipelining; groups of ranks "
        "are data-parallel",
        options=("deadline_s", "pp", "schedule"),
    ),
    "ddp_canonical": replace(
        _OVER_TORCH,
        what="DDP with the canonical all-reduce: the same bits for 1, 2, 4, 8 workers",
        faults=_VALUE_FAULTS,
        bitwise=True,
        powers_of_two=True,
        traits=Traits(masks="shard_apart"),
    ),
    "fsdp": replace(
        _OVER_TORCH,
        what="torch's fully_shard (FSDP2), each rank a process with a piece of each tensor",
        options=("deadline_s", "precision"),
    ),
    "local_sgd": replace(
        _OVER_TORCH,
        what="DiLoCo: workers that step alone, and are synchronised by an outer optimizer",
        options=("deadline_s", "inner_steps", "outer_learning_rate", "outer_momentum"),
        in_step=False,
    ),
    "finetuned": System(
        room="systems.finetuned.by_star",
        what="a small checkpoint fine-tuned as `entrenar finetune` does, over the simulated star",
        faults=(*_FAULTS, *faults.SILENT),
        options=OWN,
        traits=_STAR,
    ),
    "finetuned_by_peer": System(
        room="systems.finetuned.peer",
        what="the same fine-tuning by transformers.Trainer",
        options=TUNED,
        only=("cpu",),
    ),
    "finetuned_by_ranks": System(
        room="systems.finetuned.by_ranks",
        what="the same fine-tuning by torchrun's ranks",
        options=BY_RANKS,
        only=("cpu",),
    ),
    "finetuned_by_stages": System(
        room="systems.finetuned.by_stages",
        what=(
            "the same fine-tuning by a layer pipeline: each worker has a stage of the model, "
            "simulated"
        ),
        faults=(*_VALUE_FAULTS, "leave", *faults.ON_THE_WAY, "restart"),
        places=PIPELINE_PLACES,
        options=STAGED,
        only=("cpu",),
        traits=Traits(masks="shard", updates="server"),
    ),
    "distilled": System(
        room="systems.finetuned.distillation",
        what="a small student that learns from a teacher's shards, over the simulated star",
        faults=(*_FAULTS, *faults.SILENT),
        options=DISTILLED,
        only=("cpu",),
        traits=_STAR,
    ),
    "language_model": System(
        room="systems.probes",
        what="a small decoder on tokens: which tokens its losses count, and which "
        "tokens its outputs depend on",
        options=("rows",),
        only=("cpu",),
    ),
    "matmul": System(
        room="systems.probes.products",
        what="matrix products on one backend against the CPU and float64",
        options=("m", "k", "n", "shapes", "layout", "magnitude"),
    ),
    "backend_chain": System(
        room="systems.probes",
        what="the fallback chain under failing backends",
        only=BACKENDS,
        faults=(
            *("absent", "init_error", "out_of_memory", "non_finite_output"),
            *faults.OF_ADAPTERS,
        ),
        options=("m", "k", "n", "layout", "magnitude"),
    ),
    "manifest": System(
        room="systems.probes", what="the gradients that each backend really produces"
    ),
    "wgpu_steps": System(
        room="systems.probes",
        what="training steps on a wgpu adapter: the calls to the device and the results "
        "of each step",
        only=("wgpu",),
        options=("samples",),
    ),
    "wgpu_operations": System(
        room="systems.probes",
        what="each operation alone on a wgpu adapter, compared with float64, and with a NaN",
        only=("wgpu",),
        options=("operations",),
    ),
    "wgpu_refusals": System(
        room="systems.probes",
        what="operations without a kernel, and empty tensors, which a wgpu adapter must refuse",
        only=("wgpu",),
    ),
    "wire": System(
        room="systems.probes",
        what="the wire's codec and admission of peers, on valid and damaged bytes",
    ),
    "averaging": System(room="systems.probes", what="averages for workers of the original system"),
    "memory": System(
        room="systems.probes",
        what="each worker's share of the model in its own process, with its memory measured",
        options=("budget_bytes",),
    ),
    "elastic": System(
        room="systems.probes",
        what="`entrenar_py.elastic` on a small model: ranks are processes, which are killed, "
        "frozen and replaced; micro-batches are shards",
        only=("cpu",),
        faults=("kill", "freeze", "join", *faults.SILENT),
        places=ELASTIC_PLACES,
        options=("deadline_s", "audit_share"),
    ),
    "elastic_oracle": System(
        room="systems.probes",
        what="the same training as `elastic`, as a plain loop in one process",
        only=("cpu",),
    ),
}

TRAINERS = tuple(name for name, system in SYSTEMS.items() if system.trains)


def require_trainer(name: str | None, backends: Collection[str]) -> None:
    """Raise UsageError unless trainer `name` (None: the default) can train on `backends`."""
    if name is not None and name not in TRAINERS:
        raise UsageError.of("system", name, f"allowed are {', '.join(TRAINERS)}")
    for backend in backends:
        SYSTEMS[name or DEFAULTS["system"]].require_backend(backend, "")


def traits_of(plan: TrainingPlan) -> Traits:
    """Return the traits of a run of `plan`. Its trainer must be a key of SYSTEMS."""
    traits = SYSTEMS[plan.trainer].traits
    if workers.by_server(plan):
        return replace(traits, updates="server")
    return traits


def require_possible(plan: TrainingPlan) -> None:
    """Raise UsageError if the system of a scenario, or the trainer of a plan, can't run it.

    The error names the first impossible backend, option, number of workers or shards, fault, or
    place of a fault. Whether this machine has the backends is not checked. Checks that need the
    workload itself are in `entrenar_py.systems.require_workload`.
    """
    scenario = Scenario.of(plan)
    require("system", scenario.system, tuple(SYSTEMS))
    system, where = SYSTEMS[scenario.system], f" on system {scenario.system}"
    for backend in scenario.backends:
        system.require_backend(backend, where)
    for option in scenario.options:
        require("option", option, system.options, where)
    require_sizes(scenario)
    places = workers.places_of_faults(scenario, system.places)
    for fault in scenario.faults:
        require("fault kind", fault.kind, system.faults, where)
        if fault.at is not None:
            require(f"fault {fault.kind} at", fault.at, places, where)
        if fault.backend is not None:
            require(f"fault {fault.kind} backend", fault.backend, BACKENDS)
    if not system.is_probe:
        workers.require_possible(scenario)


def require_sizes(scenario: Scenario) -> None:
    """Raise UsageError if the system can't run the scenario's number of workers or shards."""
    if not SYSTEMS[scenario.system].powers_of_two:
        return
    for name, value in (
        ("world_size", scenario.world_size),
        ("num_shards * accumulation", scenario.num_shards * scenario.accumulation),
    ):
        least = _power_of_two(value)
        if value != least:
            where = f"{name}={value} on system {scenario.system}"
            raise UsageError(f"{where}: use a power of two, such as {least}")


def fitted(scenario: Scenario, *, fixed: Collection[str] = ()) -> Scenario:
    """Return `scenario` with sizes rounded up to powers of two, if its system requires these.

    `num_samples` is raised to at least the number of workers. If `fixed` contains "world_size",
    that field is kept, even if the system then refuses it.
    """
    known = SYSTEMS.get(scenario.system)
    if known is None or not known.powers_of_two:
        return scenario
    world_size = scenario.world_size
    if "world_size" not in fixed:
        world_size = _power_of_two(world_size)
    return scenario.with_(
        world_size=world_size,
        num_shards=_power_of_two(max(scenario.num_shards, world_size)),
        accumulation=_power_of_two(scenario.accumulation),
        num_samples=max(scenario.num_samples, world_size),
    )


def unplaced(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `options` without those that only fit one number of workers (`cuts`)."""
    return {name: value for name, value in options.items() if name not in _PARTS}


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def require(what: str, name: str, names: tuple[str, ...], where: str = "") -> None:
    """Raise UsageError unless `name` is in `names`; `what` and `where` are for the message."""
    if name not in names:
        allowed_names = ", ".join(names) or "none"
        raise UsageError(f"{what}={name!r}{where}: allowed are {allowed_names}", field=what)


def missed(result: trace.Trace) -> Fault | None:
    """Return the first planned fault that didn't strike in a run that reached its step, or None."""
    halts = result.of(trace.Halt)
    reached = halts[0].step if halts else result.scenario.num_steps
    struck = [event.fault for event in result.of(trace.Injected)]
    planned = (fault for fault in result.scenario.faults if (fault.step or 0) < reached)
    return next((fault for fault in planned if fault.to_dict() not in struck), None)
