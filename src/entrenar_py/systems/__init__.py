"""The table of systems, and `run`, which runs a scenario on its system and returns the trace.

Systems know nothing of contracts. A crash inside a system raises nothing: its trace ends `failed`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from types import ModuleType

from entrenar_py.compute import BACKENDS
from entrenar_py.shared import faults, membership, mutants, trace, updates
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.faults import PIPELINE_PLACES, RING_PLACES, Fault
from entrenar_py.shared.scenario import DEFAULTS, Scenario
from entrenar_py.shared.system import System
from entrenar_py.shared.trace import Traits
from entrenar_py.systems.tuned_options import BY_RANKS, DISTILLED, OWN, STAGED, TUNED

_TERMS = "terms"  # an option of the workload `vectors`
_REAL_OPTIONS = (
    *("heartbeat_s", "dead_after_s", "deadline_s", "block_bytes", "socket_bytes"),
    _TERMS,
)
_VALUE_FAULTS = ("non_finite_gradient", "non_finite_loss", "huge_gradient")
_TRAINING_FAULTS = (*_VALUE_FAULTS, "leave", "join")
_FAULTS = (*_TRAINING_FAULTS, *faults.ON_THE_WAY, "lie", "stranger", "restart")
_STAR, _MESH, _RING = (Traits(topology=one, masks="shard") for one in ("star", "mesh", "ring"))
# A trainer over torch.distributed, by gloo or NCCL.
_OVER_TORCH = System(
    room="torch",
    what="",
    faults=_TRAINING_FAULTS,
    options=("deadline_s",),
    only=("cpu", "cuda"),
    bitwise=False,
)

# The systems by name. The module of the same name in `room` has `run`, unless `room` is a module.
SYSTEMS: dict[str, System] = {
    "reference": System(
        room="single",
        what="the deterministic data-parallel trainer, all workers in this process",
        faults=_TRAINING_FAULTS,
        options=(_TERMS,),
        traits=Traits(masks="shard"),
    ),
    "textbook": System(
        room="single",
        what="a plain torch data-parallel loop, independent of the reference",
        faults=_TRAINING_FAULTS,
        bitwise=False,
    ),
    "parameter_server": System(
        room="star.processes",
        what="a parameter server over TCP, each worker a process of its own",
        faults=(*_FAULTS, *faults.SILENT),
        options=(*_REAL_OPTIONS, "audit_share", "updates"),
        traits=_STAR,
    ),
    "parameter_server_simulated": System(
        room="star.simulated",
        what="a parameter server and its workers, under a seeded simulator of network and time",
        faults=(*_FAULTS, *faults.SILENT),
        options=("block_bytes", "network_seed", "audit_share", "updates", _TERMS),
        traits=_STAR,
    ),
    "mesh": System(
        room="star.processes",
        what="workers that exchange blocks with each other over TCP, each a process of its own",
        faults=_FAULTS,
        options=_REAL_OPTIONS,
        traits=_MESH,
    ),
    "mesh_simulated": System(
        room="star.simulated",
        what="workers that exchange blocks with each other, under the same simulator",
        faults=_FAULTS,
        options=("block_bytes", "network_seed", _TERMS),
        traits=_MESH,
    ),
    "ring": System(
        room="star.processes",
        what="workers that send blocks around a ring over TCP, each a process of its own",
        faults=_FAULTS,
        places=RING_PLACES,
        options=_REAL_OPTIONS,
        traits=_RING,
    ),
    "ring_simulated": System(
        room="star.simulated",
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
        what="layers cut over ranks by torch's parallelize_module, groups of them data-parallel",
        options=("deadline_s", "tp"),
    ),
    "sequence_parallel": replace(
        _OVER_TORCH,
        what="tensor parallelism where, between the layers, each rank has a part of each sequence",
        options=("deadline_s", "tp"),
    ),
    "pipeline_parallel": replace(
        _OVER_TORCH,
        what="layers in stages, a rank each, by torch's pipelining, groups of them data-parallel",
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
        what="DiLoCo: workers that step alone, brought together by an outer optimizer",
        options=("deadline_s", "inner_steps", "outer_learning_rate", "outer_momentum"),
        in_step=False,
    ),
    "finetuned": System(
        room="finetuned.trained",
        what="a small checkpoint fine-tuned as `entrenar finetune` does, over the simulated star",
        faults=(*_FAULTS, *faults.SILENT),
        options=OWN,
        traits=_STAR,
    ),
    "finetuned_by_peer": System(
        room="finetuned.peer", what="the same by transformers.Trainer", options=TUNED, only=("cpu",)
    ),
    "finetuned_by_ranks": System(
        room="finetuned.by_ranks",
        what="the same by torchrun's ranks",
        options=BY_RANKS,
        only=("cpu",),
    ),
    "finetuned_by_stages": System(
        room="finetuned.by_stages",
        what="the same by a layer pipeline: each worker has a stage of the model, simulated",
        faults=(*_VALUE_FAULTS, "leave", *faults.ON_THE_WAY, "restart"),
        places=PIPELINE_PLACES,
        options=STAGED,
        only=("cpu",),
        traits=Traits(masks="shard", updates="server"),
    ),
    "distilled": System(
        room="finetuned.distilled",
        what="a small student that learns from a teacher's shards, over the simulated star",
        faults=(*_FAULTS, *faults.SILENT),
        options=DISTILLED,
        only=("cpu",),
        traits=_STAR,
    ),
    "soft_targets": System(
        room="probes",
        what="a distillation's loss and gradient of rows of logits, with what is kept of them",
        options=("pairs", "vocabulary", "top_k", "alpha", "temperatures", "spread", "alike"),
        only=("cpu",),
    ),
    "language_model": System(
        room="probes",
        what="a small decoder on tokens: what its losses are over, and what its outputs depend on",
        options=("rows",),
        only=("cpu",),
    ),
    "matmul": System(
        room="probes.products",
        what="matrix products on one backend against the CPU and float64",
        options=("m", "k", "n", "shapes", "layout", "magnitude"),
    ),
    "backend_chain": System(
        room="probes",
        what="the fallback chain under failing backends",
        only=tuple(BACKENDS),
        faults=(
            *("absent", "init_error", "out_of_memory", "non_finite_output"),
            *faults.OF_ADAPTERS,
        ),
        options=("m", "k", "n", "layout", "magnitude"),
    ),
    "manifest": System(room="probes", what="the gradients that each backend really produces"),
    "wgpu_steps": System(
        room="probes",
        what="training steps on a wgpu adapter: each one's calls to the device, and its results",
        only=("wgpu",),
        options=("samples",),
    ),
    "wgpu_operations": System(
        room="probes",
        what="each operation alone on a wgpu adapter, compared with float64, and with a NaN",
        only=("wgpu",),
        options=("operations",),
    ),
    "wgpu_refusals": System(
        room="probes",
        what="operations without a kernel, and empty tensors, which a wgpu adapter must refuse",
        only=("wgpu",),
    ),
    "wire": System(
        room="probes", what="the wire's codec and admission of peers, on valid and damaged bytes"
    ),
    "averaging": System(room="probes", what="averages for workers of the original system"),
    "memory": System(
        room="probes",
        what="each worker's share in a process of its own, its memory measured",
        options=("budget_bytes",),
    ),
}
TRAINERS = tuple(name for name, system in SYSTEMS.items() if system.trains)


def require_trainer(name: str | None, backends: Collection[str]) -> None:
    """Raise UsageError unless trainer `name` (None: the default one) can train on `backends`."""
    if name is not None and name not in TRAINERS:
        raise UsageError.of("system", name, f"allowed are {', '.join(TRAINERS)}")
    for backend in backends:
        SYSTEMS[name or DEFAULTS["system"]].require_backend(backend, "")


def run(scenario: Scenario, *, every_fault: bool = True) -> trace.Trace:
    """Run `scenario` on one thread, with its mutant planted if it names one.

    Raises UsageError for an unknown system or mutant. Any other error ends the trace as `failed`,
    with the reason. With `every_fault`, a trainer's trace also fails if a fault never strikes. Pass
    False where an earlier fault may remove the worker that a later one strikes.
    """
    _require("system", scenario.system, tuple(SYSTEMS))
    module = module_of(scenario.system)
    with mutants.planted(scenario.mutant) as planting, _one_thread():
        try:
            require_possible(scenario)
            result: trace.Trace = module.run(scenario)
            result = replace(result, traits=traits_of(scenario))
        except Exception as error:  # noqa: BLE001  (a system's crash is a result: inconclusive)
            return failed(scenario, f"{type(error).__name__}: {error}")
    absent = missed(result) if every_fault and not SYSTEMS[scenario.system].is_probe else None
    if absent is not None:
        return failed(scenario, f"fault {absent.to_dict()} never struck: no worker reaches it")
    if scenario.mutant is not None and planting.struck:
        return replace(result, events=(trace.Planted(name=scenario.mutant), *result.events))
    return result


def traits_of(scenario: Scenario) -> Traits:
    """Return the traits of a run of `scenario`; its system must be one of SYSTEMS."""
    traits = SYSTEMS[scenario.system].traits
    if updates.by_server(scenario):
        return replace(traits, updates="server")
    return traits


def module_of(system: str) -> ModuleType:
    """Return the module that holds the `run` of `system`, which is one of SYSTEMS."""
    room = SYSTEMS[system].room
    name = room if "." in room else f"{room}.{system}"
    return import_module(f"entrenar_py.systems.{name}")


def load(scenario: Scenario) -> None:
    """Load the code of the scenario's system and torch, so that a run itself loads little."""
    if scenario.system in SYSTEMS:
        import torch  # noqa: F401

        module_of(scenario.system)


def require_possible(scenario: Scenario, *, is_run: bool = True) -> None:
    """Raise UsageError if the system of `scenario` can't run it as written.

    The error names the first backend, option, number of workers or shards, fault, place of a fault,
    or workload that is not possible. Whether this machine has the backends is not checked. What
    takes the workload itself, and with it torch, is checked only of a scenario that `is_run`.
    """
    _require("system", scenario.system, tuple(SYSTEMS))
    system, where = SYSTEMS[scenario.system], f" on system {scenario.system}"
    for backend in scenario.backends:
        system.require_backend(backend, where)
    for option in scenario.options:
        _require("option", option, system.options, where)
    require_sizes(scenario)
    places = updates.places(scenario, system.places)
    for fault in scenario.faults:
        _require("fault kind", fault.kind, system.faults, where)
        if fault.at is not None:
            _require(f"fault {fault.kind} at", fault.at, places, where)
        if fault.backend is not None:
            _require(f"fault {fault.kind} backend", fault.backend, tuple(BACKENDS))
    if not system.is_probe:
        membership.require_possible(scenario)
    if system.trains and is_run:
        from entrenar_py.train.coordinator import models  # brings torch

        workload = models.model_of(scenario)
        for fault in scenario.faults:
            models.place_of(fault, workload)


def require_sizes(scenario: Scenario) -> None:
    """Raise UsageError if the system can't have the scenario's number of workers or shards."""
    if not SYSTEMS[scenario.system].powers_of_two:
        return
    for name, value in (
        ("world_size", scenario.world_size),
        ("num_shards * accumulation", scenario.num_shards * scenario.accumulation),
    ):
        least = _power_of_two(value)
        if value != least:
            where = f"{name}={value} on system {scenario.system}"
            raise UsageError(f"{where}: use a power of two, as {least}")


def fitted(scenario: Scenario, *, fixed: Collection[str] = ()) -> Scenario:
    """Return `scenario` with sizes rounded up to powers of two, if its system requires these.

    If `fixed` contains "world_size", that field is kept, even if the system then refuses it.
    `num_samples` is raised to the number of workers if it is lower.
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


def _power_of_two(number: int) -> int:
    """Return the least power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def _require(what: str, name: str, allowed: tuple[str, ...], where: str = "") -> None:
    if name not in allowed:
        allowed_names = ", ".join(allowed) or "none"
        raise UsageError(f"{what}={name!r}{where}: allowed are {allowed_names}", field=what)


def missed(result: trace.Trace) -> Fault | None:
    """Return the first planned fault that never struck though its step was reached, or None."""
    halts = result.of(trace.Halt)
    reached = halts[0].step if halts else result.scenario.num_steps
    struck = [event.fault for event in result.of(trace.Injected)]
    planned = (fault for fault in result.scenario.faults if (fault.step or 0) < reached)
    return next((fault for fault in planned if fault.to_dict() not in struck), None)


def failed(scenario: Scenario, reason: str) -> trace.Trace:
    """Return the trace of a run of `scenario` that left nothing but the reason why it failed."""
    end = trace.End(status="failed", reason=reason)
    return trace.Trace(scenario=scenario, environment={}, promises=(), events=(end,))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run torch on one thread: the number of threads changes the order in which sums are added."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
