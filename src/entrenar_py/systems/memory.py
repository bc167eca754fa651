"""One worker's share of a training run in a process of its own, with its memory measured.

The estimate is made before anything is built, from the manifest alone; the peak is the kernel's
(`VmHWM` of /proc/self/status, reset after the imports).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from entrenar_py import backends, mutants, trace
from entrenar_py.errors import SystemFailure, UsageError
from entrenar_py.scenario import Scenario
from entrenar_py.systems.recorder import Recorder
from entrenar_py.training import (
    dropout,
    engine,
    layout,
    optimizer,
    reduction,
    sharding,
    workload,
)

DEADLINE_S = 120
FLOAT_BYTES = 4
# Vectors as long as the parameters that a worker holds at the worst moment beside its tree nodes:
# weights, their initial values, autograd's gradients, the averaged gradient, and in the optimizer's
# expression up to four temporaries.
PARAMETER_VECTORS = 8
OPTIMIZER_VECTORS = {"sgd": 0, "momentum": 1, "adamw": 2}
# Allocator, code first used while training (autograd, BLAS), and the trace.
FIXED_BYTES = 48 * 2**20


def run(scenario: Scenario) -> trace.Trace:
    """Rank 0's share of `scenario` as system reference would give it, in a fresh process.

    SystemFailure if the process dies or takes longer than its deadline; UsageError for faults and
    for options other than `budget_bytes`.
    """
    budget = scenario.options.get("budget_bytes")
    if scenario.faults or set(scenario.options) != {"budget_bytes"} or type(budget) is not int:
        raise UsageError(
            f"faults={[fault.kind for fault in scenario.faults]} options={scenario.options!r} on "
            "system memory: it takes no faults, and budget_bytes, a whole number, as only option"
        )
    command = [sys.executable, "-m", "entrenar_py.systems.memory"]
    try:
        child = subprocess.run(
            command,
            input=json.dumps(scenario.to_dict()),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SystemFailure(f"the worker's process took longer than {DEADLINE_S} s") from error
    if child.returncode != 0:
        last = child.stderr.strip().splitlines()[-1:] or ["no message"]
        raise SystemFailure(f"the worker's process exited with {child.returncode}: {last[0]}")
    measured = json.loads(child.stdout.splitlines()[-1])
    recorder = Recorder(scenario)
    recorder.emit(
        trace.Memory(
            rank=0,
            backend=scenario.backend_of(0),
            budget_bytes=budget,
            **measured,
        )
    )
    return recorder.finish(status="completed")


def estimate_bytes(scenario: Scenario, num_parameters: int, activations: int) -> int:
    """Bytes that one worker's share will need on top of the interpreter and its libraries.

    `activations` is the number of floats that one sample keeps for its backward pass. The worker
    holds at most log2(shards) + 1 nodes of the reduction tree.
    """
    nodes = (scenario.num_shards - 1).bit_length() + 1
    vectors = PARAMETER_VECTORS + OPTIMIZER_VECTORS[scenario.optimizer] + nodes
    shard = -(-scenario.batch_size // scenario.num_shards)
    return FIXED_BYTES + FLOAT_BYTES * (vectors * num_parameters + shard * activations)


def measure(scenario: Scenario) -> dict[str, int]:
    """Does this process's share; baseline, peak and estimate in bytes."""
    work(scenario.with_(width=8))  # loads what is loaded at first use
    model = _model(scenario)
    estimate = estimate_bytes(
        scenario, layout.Layout(model.specs).num_trainable, activations=4 * scenario.width
    )
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to what is resident now
    baseline = _peak_bytes()
    work(scenario)
    return {
        "baseline_bytes": baseline,
        "peak_bytes": _peak_bytes(),
        "estimate_bytes": estimate,
    }


def work(scenario: Scenario) -> None:
    """What worker 0 does in every step: its run of shards, its tree nodes, an optimizer step.

    The other workers' nodes never come, so the step is made on this worker's own mean: other
    numbers, the same memory.
    """
    model = _model(scenario)
    scale = engine.scale_of(model.weight_max * scenario.batch_size)
    linear = backends.open_backend(scenario.backend_of(0)).linear
    replica = engine.Engine(model, linear, model.initial(scenario.rng("initial")), scale=scale)
    state = optimizer.initial_state(scenario.optimizer, replica.layout.num_trainable)
    rule = optimizer.Rule(scenario.optimizer, scenario.weight_decay, replica.layout.decayed)
    shards = sharding.cut(range(scenario.batch_size), scenario.num_shards)
    run = sharding.runs(range(scenario.num_shards), range(scenario.world_size))[0]
    for _ in range(scenario.num_steps):
        leaves = (
            reduction.Node(
                0, shard, *replica.shard(shards[shard], accumulation=1, drop=dropout.none)
            )
            for shard in run
        )
        node = reduction.fold(leaves, scenario.num_shards)[0]
        average = optimizer.mean(node.vector, node.weight * scale)
        gradient = average[: replica.layout.num_trainable]
        optimizer.step(rule, replica.parameters, gradient, state, scenario.learning_rate)


def _model(scenario: Scenario) -> workload.Workload:
    return workload.build(
        scenario.workload,
        num_samples=scenario.num_samples,
        width=scenario.width,
        data=scenario.rng("data"),
    )


def _peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise SystemFailure("/proc/self/status has no VmHWM line: peak memory can't be read here")


if __name__ == "__main__":
    asked = Scenario.from_dict(json.load(sys.stdin))
    with mutants.planted(asked.mutant):
        print(json.dumps(measure(asked)))
