"""Measurement of the memory that each worker's part of a training run takes, in its own process.

The processes are forks of one that has loaded all code and computed nothing. The estimate is made
before a worker is built, from the scenario and the manifest alone. The peak is the most that the
worker's device had in use, or on the CPU the kernel's `VmHWM` in /proc/self/status, reset when all
code is loaded.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import finalize

import torch

from entrenar_py import compute as backends
from entrenar_py.compute import Backend
from entrenar_py.shared import mutants, scenario, trace
from entrenar_py.shared.errors import BackendUnavailable, SystemFailure, UsageError
from entrenar_py.shared.patience import Patience
from entrenar_py.shared.scenario import Scenario, backend_kind
from entrenar_py.train.arithmetic import engine, optimizer, reduction, sharding
from entrenar_py.train.arithmetic.tensors import TensorSpec
from entrenar_py.train.coordinator import models
from entrenar_py.train.coordinator.recorder import Recorder


@dataclass(frozen=True)
class Measured:
    """Bytes in use before the work, the peak during it, and the device's total if known."""

    baseline_bytes: int
    peak_bytes: int
    reported_bytes: int | None


Work = Callable[[Backend], None]


def measured_on(name: str, *, before: Work, work: Work) -> Measured:
    """Run `before`, then `work` on backend `name`; return the memory that `work` takes.

    Raises BackendUnavailable when the backend can't be opened or fails.
    """
    return MEASURES[scenario.backend_kind(name)](name, before, work)


def _of_cuda(name: str, before: Work, work: Work) -> Measured:
    """Measure a GPU's memory with the statistics of torch's allocator."""
    import torch

    backend = backends.open_backend(name)
    before(backend)
    index = int(name.partition(":")[2] or torch.cuda.current_device())
    torch.cuda.reset_peak_memory_stats(index)
    baseline = torch.cuda.memory_allocated(index)
    work(backend)
    total = torch.cuda.get_device_properties(index).total_memory
    return Measured(baseline, torch.cuda.max_memory_allocated(index), total)


def _of_adapter(name: str, before: Work, work: Work) -> Measured:
    """Measure an adapter's memory by counting the buffers that the backend creates.

    WebGPU can't report an adapter's memory, and wgpu-native's report counts objects, not bytes.
    """
    from entrenar_py.compute import wgpu
    from entrenar_py.compute.wgpu.device import open_device

    device = open_device(int(name.partition(":")[2] or 0))
    counted = Counted(device.handle)
    backend = wgpu.WgpuBackend(replace(device, handle=counted), name=name)
    before(backend)
    counted.peak_bytes = baseline = counted.held_bytes
    work(backend)
    return Measured(baseline, counted.peak_bytes, None)


MEASURES: dict[str, Callable[[str, Work, Work], Measured]] = {"cuda": _of_cuda, "wgpu": _of_adapter}


class Counted:
    """A wrapper of a wgpu.GPUDevice, `handle`, that counts the bytes of its buffers."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self.held_bytes = self.peak_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def create_buffer(self, **given: Any) -> Any:
        """Create a buffer, which is counted until it is garbage-collected."""
        return self._count(self._handle.create_buffer(**given))

    def create_buffer_with_data(self, **given: Any) -> Any:
        """Create a buffer with content, counted like any other buffer."""
        return self._count(self._handle.create_buffer_with_data(**given))

    def _count(self, buffer: Any) -> Any:
        self._add(buffer.size)
        finalize(buffer, self._add, -buffer.size)
        return buffer

    def _add(self, num_bytes: int) -> None:
        self.held_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)


PATIENCE_S = 120.0
FLOAT_BYTES = 4
# The allocator, and code that is first used at the real size (BLAS).
FIXED_BYTES = 16 * 2**20
# The most vectors of the trainable tensors' length that a worker has at once, without tree nodes
# and optimizer state: weights, autograd's gradients and their parts, the averaged gradient, its
# squares in float64, the clipped gradient, the optimizer's temporaries. 5 were measured, for every
# optimizer, with and without clipping.
PARAMETER_VECTORS = 6
# The same on a device, which has neither tree nor optimizer: weights, gradients, and the buffers
# from which gradients are read back.
DEVICE_VECTORS = 3
DEVICE_FIXED_BYTES = 2**20
# glibc returns blocks of this size or more to the kernel at once, instead of adapting the size. The
# peak then shows the memory in use, the same in every run, and not the heap's fragmentation.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**16)}
OPTIMIZER_VECTORS = {"sgd": 0, "momentum": 1, "adamw": 2}
# Floats per sample of the data set: the sample, its sources, its place in the epoch's order.
DATA_FLOATS = {"linear": 16, "mlp": 128, "decoder": 256}


def run(scenario: Scenario) -> trace.Trace:
    """Record a Memory event for each rank, which has the same shards as with `reference`.

    A rank with an unavailable device gets a failed Attempt instead. Raises SystemFailure if a
    process dies or stalls. Raises UsageError without a budget, and for a `workload`,
    `stops` or `detail` that this system does not support.
    """
    budget = scenario.options.get("budget_bytes")
    if type(budget) is not int:
        raise UsageError(
            f"options budget_bytes={budget!r} on system memory: use a whole number of bytes"
        )
    if scenario.workload not in DATA_FLOATS:
        raise UsageError(
            f"workload={scenario.workload!r} on system memory: use {', '.join(DATA_FLOATS)}"
        )
    for name, honoured in (("stops", ()), ("detail", "digests")):
        if getattr(scenario, name) != honoured:
            raise UsageError(
                f"{name}={getattr(scenario, name)!r} on system memory: use {honoured!r}"
            )
    specs = models.model_of(scenario).specs
    recorder = Recorder(scenario)
    for rank, record in enumerate(_measured_apart(scenario)):
        name = scenario.backend_of(rank)
        estimate = (estimate_bytes if name == "cpu" else estimate_device_bytes)(
            scenario, rank, specs
        )
        if record["planted"]:
            recorder.emit(trace.Planted(name=scenario.mutant or ""))
        if record["unavailable"]:
            recorder.emit(trace.Attempt(backend=name, served=False, reason=record["unavailable"]))
            continue
        recorder.emit(
            trace.Memory(
                rank=rank,
                backend=name,
                baseline_bytes=record["baseline"],
                peak_bytes=record["peak"],
                estimate_bytes=estimate,
                budget_bytes=min(budget, record["reported"] or budget),
                reported_bytes=record["reported"],
            )
        )
    return recorder.finish(status="completed")


def estimate_bytes(scenario: Scenario, rank: int, specs: Sequence[TensorSpec]) -> int:
    """Return the bytes that worker `rank` will need, without the interpreter and its libraries.

    Source: distributed-training-v1, F-HET-002.
    """
    trainable = sum(prod(spec.shape) for spec in specs if spec.role == "trainable")
    others = sum(prod(spec.shape) for spec in specs) - trainable
    vectors = (
        PARAMETER_VECTORS
        + OPTIMIZER_VECTORS[scenario.optimizer]
        + _nodes_max(_run_of(scenario, rank))
        + (_nodes_max(range(scenario.accumulation)) if scenario.accumulation > 1 else 0)
    )
    samples = -(-scenario.batch_size // (scenario.num_shards * scenario.accumulation))
    floats = (
        vectors * trainable
        + 2 * others
        + samples * _activations(scenario)
        + scenario.num_samples * DATA_FLOATS[scenario.workload]
    )
    return FIXED_BYTES + FLOAT_BYTES * floats


def estimate_device_bytes(scenario: Scenario, rank: int, specs: Sequence[TensorSpec]) -> int:
    """Return the bytes of device memory that worker `rank` will need.

    On an adapter, each size of micro-batch that occurs has its own program, which keeps its memory.
    Source: distributed-training-v1, F-HET-002.
    """
    trainable = sum(prod(spec.shape) for spec in specs if spec.role == "trainable")
    others = sum(prod(spec.shape) for spec in specs) - trainable
    shards = sharding.cut(range(scenario.batch_size), scenario.num_shards)
    parts = [
        len(part)
        for shard in _run_of(scenario, rank)
        for part in sharding.cut(shards[shard], scenario.accumulation)
    ]
    sizes = set(parts) - {0}
    if backend_kind(scenario.backend_of(rank)) == "cuda":
        sizes = {max(sizes, default=0)}
    floats = sum(
        DEVICE_VECTORS * trainable + 2 * others + size * _activations(scenario) for size in sizes
    )
    return DEVICE_FIXED_BYTES + FLOAT_BYTES * floats


def _activations(scenario: Scenario) -> int:
    """Return the number of floats that one sample needs in the forward and the backward pass."""
    masks = 4 if scenario.dropout else 0
    per_sample = {
        "linear": 16,
        "mlp": (10 + masks) * scenario.width + 256,
        "decoder": 110_000 + masks * 5_000,
    }
    return per_sample[scenario.workload]


def _nodes_max(run: Sequence[int]) -> int:
    """Return the largest number of nodes that `reduction.fold` holds, including the next leaf."""
    return 1 + max(reduction.num_nodes(run[0], leaf) for leaf in run)


def _run_of(scenario: Scenario, rank: int) -> Sequence[int]:
    return sharding.runs(range(scenario.num_shards), range(scenario.world_size))[rank]


def _measured_apart(scenario: Scenario) -> list[dict[str, Any]]:
    """Return the result of `measured` for each rank, each from a process that has ended.

    Raises SystemFailure if one of them fails.
    """
    with subprocess.Popen(
        [sys.executable, "-m", "entrenar_py.systems.probes.memory"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **ALLOCATOR},
        start_new_session=True,  # it and its forks are killed together
    ) as child:
        output, errors = _ask(child, scenario)
    measurements = [json.loads(line) for line in output.splitlines()]
    if child.returncode != 0:
        last = errors.strip().splitlines()[-1:] or ["no message"]
        raise SystemFailure(
            f"the process of rank {len(measurements)} exited with {child.returncode}: {last[0]}"
        )
    return measurements


def _ask(child: subprocess.Popen[str], scenario: Scenario) -> tuple[str, str]:
    """Send `scenario` to `child`, and return its two outputs; kill it if it stalls."""
    message: str | None = json.dumps(scenario.to_dict())
    patience = Patience(PATIENCE_S)
    try:
        with _ended_by_interrupt(child):
            while True:
                try:
                    return child.communicate(message, timeout=patience.interval_s)
                except subprocess.TimeoutExpired as error:
                    message = None  # it had begun to send the answer
                    if patience.look():
                        raise SystemFailure(
                            f"measuring {scenario.world_size} ranks took longer than "
                            f"{PATIENCE_S:g} s"
                        ) from error
    finally:
        _kill(child)


def _kill(child: subprocess.Popen[str]) -> None:
    """Kill `child` and its forks, unless it has ended."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)


@contextmanager
def _ended_by_interrupt(child: subprocess.Popen[str]) -> Iterator[None]:
    """On SIGINT in the block, kill `child`; at the end of the block, raise KeyboardInterrupt.

    The harness's own handler would only note the signal, and wait until the run is over. Outside
    the main thread, and if SIGINT is ignored, this changes nothing.
    """
    before = signal.getsignal(signal.SIGINT)
    main = threading.current_thread() is threading.main_thread()
    if not main or before is signal.SIG_IGN:
        yield
        return
    interrupted = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        interrupted.set()
        _kill(child)

    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if interrupted.is_set():
            raise KeyboardInterrupt


def measure(scenario: Scenario, rank: int) -> Measured:
    """Do the work of `rank` in this process; return the bytes in use before it, and the peak.

    Raises BackendUnavailable if the rank's device can't be used.
    """
    name = scenario.backend_of(rank)
    tiny = scenario.with_(world_size=1, num_shards=1, batch_size=1, num_steps=1, width=8)
    if name != "cpu":
        return measured_on(name, before=partial(work, tiny, 0), work=partial(work, scenario, rank))
    backend = backends.open_backend(name)
    work(tiny, 0, backend)  # loads all code
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to what is resident now
    baseline = _peak_bytes()
    work(scenario, rank, backend)
    return Measured(baseline, _peak_bytes(), None)


def work(scenario: Scenario, rank: int, backend: Backend) -> None:
    """Do the work of worker `rank` in every step: shards, tree nodes, an optimizer step.

    The nodes of other workers are missing, so each step uses this worker's first node: the numbers
    are wrong, but the memory is right. Every step has the first batch and the peak learning rate.
    """
    model = models.model_of(scenario)
    scale = engine.scale_of(model.weight_max * scenario.batch_size)
    replica = engine.Engine(model, backend, model.initial(scenario.rng("initial")), scale=scale)
    state = optimizer.initial_state(scenario.optimizer, replica.layout.num_trainable)
    visit = sharding.order(scenario.num_samples, scenario.rng("order", 0))
    ids = sharding.batch(visit, sharding.Position(), scenario.batch_size)
    rule = optimizer.Rule(scenario.optimizer, scenario.weight_decay, replica.layout.decayed)
    for step in range(scenario.num_steps):
        node = _share(scenario, rank, replica, step, ids)[0]
        average = optimizer.mean(node.vector, model.weight(ids) * scale)
        gradient = average[: replica.layout.num_trainable]
        clipped = optimizer.clip(gradient, optimizer.norm_l2(gradient), scenario.clip_norm)
        optimizer.step(rule, replica.parameters, clipped, state, scenario.learning_rate)
        replica.average_buffers(average)


def _share(
    scenario: Scenario, rank: int, replica: engine.Engine, step: int, ids: sharding.Ids
) -> list[reduction.Node]:
    """Return the nodes that worker `rank` would send in `step`."""
    shards = sharding.cut(ids, scenario.num_shards)

    def leaf(shard: int) -> reduction.Node:
        drop = engine.Dropout(scenario.dropout, scenario.rng("dropout", step, shard))
        vector, loss, weight = replica.shard(
            shards[shard],
            accumulation=scenario.accumulation,
            drop=drop if scenario.dropout else engine.no_dropout,
        )
        return reduction.Node(0, shard, vector, loss, weight)

    return reduction.fold(map(leaf, _run_of(scenario, rank)), scenario.num_shards)


def _peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise SystemFailure("/proc/self/status has no VmHWM line: peak memory can't be read here")


def measured(scenario: Scenario, rank: int) -> dict[str, Any]:
    """Return the measurement of the work of `rank` in this process, as a JSON object.

    It has the bytes, `planted` (whether the mutant ran), and `unavailable` (the reason why the
    device is unavailable, or "").
    """
    torch.set_num_threads(1)  # as in `systems.run`
    record: dict[str, Any] = {"unavailable": ""}
    with mutants.planted(scenario.mutant) as planting:
        try:
            bytes_of = measure(scenario, rank)
            record |= {"baseline": bytes_of.baseline_bytes, "peak": bytes_of.peak_bytes}
            record["reported"] = bytes_of.reported_bytes
        except BackendUnavailable as error:
            record["unavailable"] = str(error)
    record["planted"] = scenario.mutant is not None and planting.struck
    return record


def main() -> None:
    """Read a scenario from standard input; print one line for each rank, from its own fork.

    If a fork fails, end with the same exit status or signal.
    """
    scenario = Scenario.from_dict(json.load(sys.stdin))
    if scenario.mutant is not None:
        mutants.catalogue()  # once, not in each fork
    for rank in range(scenario.world_size):
        if os.fork() == 0:
            print(json.dumps(measured(scenario, rank)), flush=True)
            os._exit(0)  # shutting torch down takes half a second
        code = os.waitstatus_to_exitcode(os.wait()[1])
        if code < 0:
            os.kill(os.getpid(), -code)
        if code > 0:
            sys.exit(code)


if __name__ == "__main__":
    main()
