"""F-DP-004, F-HET-001, F-HET-002, F-PAR-006: the results of each backend, the memory of each rank.

Sources: distributed-training-v1; parallelism-v1, F-PAR-006.
"""

from __future__ import annotations

import itertools
from itertools import zip_longest
from typing import Any

from entrenar_py.check import evidence
from entrenar_py.check.clauses.check import Check, judge_each, note_software, probe
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import missing
from entrenar_py.check.evidence.needs import Traces
from entrenar_py.shared.faults import OF_ADAPTERS, Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import (
    Attempt,
    Halt,
    Held,
    Injected,
    Manifest,
    Memory,
    Product,
    Start,
    Trace,
)
from entrenar_py.shared.verdict import Finding, Tally

# --- the chain CUDA -> wgpu -> CPU ----------------------------------------------------------------

ORDER = ("cuda", "wgpu", "cpu")  # the order that the clause demands
KINDS = ("absent", "init_error", "out_of_memory", "non_finite_output")


def plan_chains(invariant: Invariant) -> list[Scenario]:
    """Plan a chain without faults, and chains in which one, two or all backends fail in every way.

    Also plan a real adapter that fails, as the first of two backends and as the second of three.

    A working backend in front of a failing one is left out of the chain, because it would compute
    the result, and the fault would never strike.
    """
    planned = [_planned((), ())]
    for count in range(1, len(ORDER) + 1):
        for failing in itertools.combinations(ORDER, count):
            planned += [
                _planned(failing, kinds) for kinds in itertools.product(KINDS, repeat=count)
            ]
    for kind in OF_ADAPTERS:
        planned += [
            _planned(("wgpu",), (kind,)),
            _planned(("cuda", "wgpu"), ("absent", kind)),
        ]
    return [scenario.with_(seed=seed) for seed, scenario in enumerate(planned)]


def _planned(failing: tuple[str, ...], kinds: tuple[str, ...]) -> Scenario:
    last = ORDER.index(failing[-1]) if failing else -1
    struck = zip(failing, kinds, strict=True)
    faults = tuple(Fault(kind=kind, backend=name) for name, kind in struck)
    return probe("backend_chain", backends=failing + ORDER[last + 1 :], faults=faults)


def judge_chains(invariant: Invariant, traces: Traces) -> Finding:
    """Judge that every run tried the backends in order, and gave a reason for each failure.

    A run must end with a product that float64 confirms, or with a halt that names every reason.
    """
    tally, probe = Tally(invariant.id), _planned((), ()).system
    for trace in traces:
        if trace.end.status == "failed":
            tally.miss(trace.end.reason)
            continue
        if trace.scenario.system != probe:
            what = f"system {trace.scenario.system} shows no fallback, system {probe} does"
            tally.miss(missing.probed(invariant, what))
            continue
        _judge_attempts(tally, trace)
        if trace.of(Halt):
            _judge_halt(tally, trace)
        else:
            _judge_result(tally, trace)
        _miss_unstruck(tally, trace)
        _note_devices(tally, trace)
    nothing = "no run of the backend chain was recorded"
    return tally.finding(nothing=missing.probed(invariant, nothing))


def _chain(scenario: Scenario) -> tuple[str, ...]:
    return tuple(name for name in ORDER if name in scenario.backends)


def _judge_attempts(tally: Tally, trace: Trace) -> None:
    attempts = trace.of(Attempt)
    scenario = trace.scenario
    tried = tuple(attempt.backend for attempt in attempts)
    due = _chain(trace.scenario)[: max(1, len(tried))]
    tally.equal(due, tried, "the chain was tried out of order", scenario=scenario)
    doomed = {fault.backend for fault in trace.scenario.faults}
    for position, attempt in enumerate(attempts):
        last = position == len(attempts) - 1
        if attempt.served:
            tally.check(
                last, f"{attempt.backend} served and the chain continued", scenario=scenario
            )
            tally.check(
                attempt.backend not in doomed,
                f"{attempt.backend} served although it was made to fail",
                tensor="product",
                expected=f"{attempt.backend} fails",
                got=f"{attempt.backend} served",
                scenario=scenario,
            )
        else:
            message = f"{attempt.backend} failed without a reason"
            tally.check(bool(attempt.reason), message, scenario=scenario)


def _judge_result(tally: Tally, trace: Trace) -> None:
    """Check that there is one product, from the backend that served, finite and right."""
    scenario = trace.scenario
    products = trace.of(Product)
    served = [attempt.backend for attempt in trace.of(Attempt) if attempt.served]
    tally.equal(
        served[:1],
        [product.backend for product in products],
        "the result does not come from the one backend that served",
        scenario=scenario,
    )
    for product in products:
        rows, _, columns = product.shape
        tally.check(
            product.finite
            and product.result_shape == (rows, columns)
            and product.error_f64 <= product.bound,
            f"{product.backend} served a product that float64 does not confirm: off by "
            f"{product.error_f64:.3g}, float32 rounding explains at most {product.bound:.3g}",
            tensor="product",
            element=product.element,
            expected=f"<= {product.bound:.3g}",
            got=f"{product.error_f64:.3g}",
            scenario=scenario,
        )
    tally.check(bool(served), "the run ended with neither a result nor a halt", scenario=scenario)


def _judge_halt(tally: Tally, trace: Trace) -> None:
    """Check that every backend failed, the halt names each reason, and no product was returned."""
    scenario = trace.scenario
    attempts = trace.of(Attempt)
    halted = trace.of(Halt)[-1].reason
    doomed = {fault.backend for fault in trace.scenario.faults}
    chain = _chain(trace.scenario)
    message = f"the chain halted though no fault was planned for {chain[-1]}: {halted}"
    tally.check(chain[-1] in doomed, message, scenario=scenario)
    tally.check(not trace.of(Product), "a halted chain returned a product", scenario=scenario)
    for name in chain:
        failed = any(attempt.backend == name and not attempt.served for attempt in attempts)
        message = f"the chain halted though {name} did not fail: {halted}"
        tally.check(failed, message, scenario=scenario)
    for attempt in attempts:
        message = f"the halt does not say why {attempt.backend} failed: {halted}"
        shown = {"expected": attempt.reason, "got": halted}
        tally.check(attempt.reason in halted, message, **shown, scenario=scenario)


def _miss_unstruck(tally: Tally, trace: Trace) -> None:
    """Count as missing the planned faults that never struck."""
    struck = [dict(event.fault) for event in trace.of(Injected)]
    for fault in trace.scenario.faults:
        if fault.to_dict() not in struck:
            tally.miss(
                f"the planned {fault.kind} of {fault.backend} never struck, in a chain of "
                f"{', '.join(trace.scenario.backends)}; leave out backends that serve before it"
            )


def _note_devices(tally: Tally, trace: Trace) -> None:
    """Note backends that failed without a planned fault, and stand-in or software devices."""
    struck = {event.fault.get("backend") for event in trace.of(Injected)}
    for attempt in trace.of(Attempt):
        if not attempt.served and attempt.backend not in struck:
            tally.note(f"{attempt.backend} failed without a planned fault: {attempt.reason}")
        if attempt.device.startswith("stand-in"):
            tally.note(f"{attempt.backend} was simulated by a {attempt.device}")
        note_software(tally, attempt)


# --- manifests of gradients -----------------------------------------------------------------------

BACKENDS = ("cpu", "wgpu", "cuda")
DECLARED = "model"  # the backend name in the model's own manifest


def plan_manifests(invariant: Invariant) -> list[Scenario]:
    """Plan one gradient for each of the workloads linear, mlp and decoder."""
    return [
        probe("manifest", workload=workload, backends=BACKENDS)
        for workload in ("linear", "mlp", "decoder")
    ]


def judge_manifests(invariant: Invariant, traces: Traces) -> Finding:
    """Judge that in each run, on two or more backends, all manifests are equal to the first.

    The first is the manifest that the model itself declares, if it was recorded, since all backends
    might have the same error.
    """
    tally, probe = Tally(invariant.id), plan_manifests(invariant)[0].system
    for trace in evidence.usable(traces, tally):
        if trace.scenario.system == probe or trace.of(Manifest):
            _compare_manifests(tally, trace)
    return tally.finding(nothing=missing.probed(invariant, "no gradient manifest was recorded"))


def _compare_manifests(tally: Tally, trace: Trace) -> None:
    manifests = sorted(trace.of(Manifest), key=lambda manifest: manifest.backend != DECLARED)
    produced = [manifest for manifest in manifests if manifest.backend != DECLARED]
    skipped = [f"{a.backend} ({a.reason})" for a in trace.of(Attempt) if not a.served]
    if len(produced) < 2:
        only = ", ".join(manifest.backend for manifest in produced) or "none"
        tally.miss(
            f"two backends are needed to compare manifests, given: {only}; "
            f"skipped: {', '.join(skipped) or 'none'}"
        )
    for reason in skipped:
        tally.note(f"skipped: {reason}")
    for manifest in produced:
        message = f"{manifest.backend} produced no gradient at all"
        tally.check(bool(manifest.entries), message, **evidence.place(trace, manifest))
        note_software(tally, manifest)
    for manifest in manifests[1:]:
        _compare_entries(tally, manifests[0], manifest, trace)


def _compare_entries(tally: Tally, first: Manifest, other: Manifest, trace: Trace) -> None:
    for position, (expected, got) in enumerate(zip_longest(first.entries, other.entries)):
        message = f"gradient {position} on {other.backend} differs from the one on {first.backend}"
        place = {"tensor": (expected or got)[0], **evidence.place(trace, other)}
        tally.equal(expected, got, message, **place)


# --- memory ---------------------------------------------------------------------------------------

# An estimate is an upper bound on the growth of a worker's memory since before the model was built.
# An estimate of STANDS_OUT_BYTES or more must also be at most SLACK times the growth. A smaller
# model may fit into free memory of the interpreter's allocator, so that its growth can't be seen.
SLACK = 1.5
STANDS_OUT_BYTES = 128 * 2**20
# On a device, the memory of the interpreter doesn't count.
STANDS_OUT_ON_DEVICE_BYTES = 8 * 2**20


def compare_memory(tally: Tally, trace: Trace) -> None:
    """Compare every rank's peak with its budget, and its growth with the estimate made before."""
    measured = trace.of(Memory)
    for memory in measured:
        _compare_rank(tally, memory, trace)
    skipped = {one.backend: one.reason for one in trace.of(Attempt) if not one.served}
    for name, reason in skipped.items():
        tally.note(f"not measured: {name} ({reason})")
    world = range(trace.scenario.world_size)
    due = {rank for rank in world if trace.scenario.backend_of(rank) not in skipped}
    ranks = due - {memory.rank for memory in measured}
    if measured and ranks:
        tally.miss(f"the memory of ranks {sorted(ranks)} was not measured")


def _compare_rank(tally: Tally, memory: Memory, trace: Trace) -> None:
    worker = f"worker {memory.rank} on {memory.backend}"
    place = evidence.place(trace, memory)
    on_host = memory.backend == "cpu"
    if not on_host and memory.reported_bytes is None:
        tally.note(f"{memory.backend} reports no size of its memory: the budget is the scenario's")
    message = (
        f"{worker} peaked at {memory.peak_bytes} bytes, but its budget is {memory.budget_bytes} "
        "bytes"
    )
    tally.at_most(memory.budget_bytes, memory.peak_bytes, message, **place)
    grown = memory.peak_bytes - memory.baseline_bytes
    stands_out_bytes = STANDS_OUT_BYTES if on_host else STANDS_OUT_ON_DEVICE_BYTES
    stands_out = memory.estimate_bytes >= stands_out_bytes
    least = memory.estimate_bytes / SLACK if stands_out else 0
    tally.check(
        least <= grown <= memory.estimate_bytes,
        f"{worker} grew by {grown} bytes, but the estimate was {memory.estimate_bytes} bytes",
        expected=f"{least:.0f} to {memory.estimate_bytes}",
        got=str(grown),
        **place,
    )


def plan_memory(invariant: Invariant) -> list[Scenario]:
    """Plan two workers on the CPU, and one worker on each type of device.

    Each model is large compared with the other memory in use there.
    """
    usual: dict[str, Any] = {"workload": "mlp", "world_size": 2, "num_steps": 2}
    host = probe(
        "memory",
        **usual,
        num_shards=4,
        num_samples=64,
        batch_size=64,
        width=2304,
        optimizer="adamw",
        options={"budget_bytes": 2 * 2**30},
    )
    devices = probe(
        "memory",
        **usual,
        seed=1,
        num_shards=2,
        num_samples=8,
        batch_size=8,
        width=1024,
        backends=("wgpu", "cuda"),
        options={"budget_bytes": 2**25},
    )
    return [host, devices]


# --- parts of a model's parameters ----------------------------------------------------------------

# The tolerance if a contract gives none. Norms and the first matrices of adapters are on all ranks:
# 3 % of the largest workload.
RELATIVE = 0.05


def judge_shares(invariant: Invariant, traces: Traces) -> Finding:
    """Compare each rank's bytes of parameters with the model's divided by the number of ranks."""
    tally = Tally(invariant.id)
    relative = RELATIVE if invariant.tolerance is None else invariant.tolerance
    for trace in evidence.usable(traces, tally):
        shares = trace.of(Held)
        for share in shares:
            most = share.whole_bytes * (1 + relative) / share.num_parts
            message = (
                f"rank {share.rank} holds {share.held_bytes} bytes of parameters, but "
                f"1/{share.num_parts} of the model is {share.whole_bytes / share.num_parts:.0f} "
                "bytes"
            )
            place = evidence.place(trace, share)
            tally.at_most(most, share.held_bytes, message, form=".0f", **place)
        silent = {start.rank for start in trace.of(Start)} - {share.rank for share in shares}
        if shares and silent:
            tally.miss(f"it was not recorded how much ranks {sorted(silent)} hold")
    return tally.finding(
        nothing="no run spread its parameters over ranks: record one with layout tp, dp_shard or "
        "fsdp and an event Held of each rank"
    )


def plan_shares(invariant: Invariant) -> list[Scenario]:
    """Plan both trainers that cut each layer, training all parameters and adapters only."""
    sizes = {"world_size": 2, "num_samples": 6, "batch_size": 6, "num_steps": 1}
    return [
        probe(system, workload=workload, **sizes)
        for system in ("tensor_parallel", "sequence_parallel")
        for workload in ("decoder", "decoder_full")
    ]


ROWS = (
    Check(
        name="fallback",
        id="F-DP-004",
        decides="the chain CUDA, wgpu, CPU gives a correct, finite result, or reports why not",
        spoken_of="fallback chain degradation dispatch",
        judge=judge_chains,
        plan=plan_chains,
    ),
    Check(
        name="manifest",
        id="F-HET-001",
        decides="every backend gives gradients of the same names, shapes and dtypes, in one order",
        spoken_of="tensor layout shapes dtype mixed backend gradient-size",
        judge=judge_manifests,
        plan=plan_manifests,
    ),
    Check(
        name="memory",
        id="F-HET-002",
        decides="each worker's peak memory stays within its device's budget and the estimate",
        spoken_of="vram memory budget peak",
        judge=judge_each(compare_memory, "no worker's memory was measured"),
        plan=plan_memory,
        tolerance_kinds=("bytes",),
    ),
    Check(
        name="holdings",
        id="F-PAR-006",
        decides="ranks that divide a model's parameters hold little more than their part",
        spoken_of="tensor-parallel sequence-parallel memory-share",
        judge=judge_shares,
        plan=plan_shares,
        tolerance_kinds=("relative",),
        takes_tolerance=True,
        not_of_commands="it is unknown which tensors a script intends to keep unsharded on every "
        "rank",
    ),
)
