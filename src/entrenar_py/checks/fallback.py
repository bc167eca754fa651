"""F-DP-004: the chain CUDA -> wgpu -> CPU yields a right, finite result, or says why not.

Failure degrades, never panics, never fakes. Source: distributed-training-v1, F-DP-004.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product as combinations

from entrenar_py.contract import Invariant
from entrenar_py.faults import Fault
from entrenar_py.scenario import Scenario
from entrenar_py.trace import Attempt, Halt, Injected, Product, Trace
from entrenar_py.verdict import Finding, Tally

ORDER = ("cuda", "wgpu", "cpu")  # as the clause gives it
SYSTEM = "backend_chain"
KINDS = ("absent", "init_error", "out_of_memory", "non_finite_output")


def plan(invariant: Invariant) -> list[Scenario]:
    """No fault, each fault on each GPU, each pair of faults on both, and everything failing."""
    planned: list[tuple[Fault, ...]] = [()]
    planned += [(_fault(kind, name),) for name in ORDER[:2] for kind in KINDS]
    planned += [
        (_fault(first, "cuda"), _fault(second, "wgpu"))
        for first, second in combinations(KINDS, repeat=2)
    ]
    planned += [tuple(_fault(kind, name) for name in ORDER) for kind in KINDS]
    return [
        Scenario(system=SYSTEM, workload="linear", world_size=1, seed=seed, faults=faults)
        for seed, faults in enumerate(planned)
    ]


def _fault(kind: str, backend: str) -> Fault:
    return Fault(kind=kind, backend=backend)


def judge(invariant: Invariant, traces: Sequence[Trace]) -> Finding:
    """HELD if every run tried the backends in order, gave a reason for each failure, and ended
    either with a product that float64 confirms or with a halt that names every reason.
    """
    tally = Tally(invariant.id)
    for trace in traces:
        if trace.end.status == "failed":
            tally.miss(trace.end.reason)
            continue
        if trace.scenario.system != SYSTEM:
            tally.miss(f"system {trace.scenario.system} shows no fallback; use system {SYSTEM}")
            continue
        _judge_attempts(tally, trace)
        if trace.of(Halt):
            _judge_halt(tally, trace)
        else:
            _judge_result(tally, trace)
        _note_real_failures(tally, trace)
    return tally.finding(nothing="no run of the backend chain was recorded")


def _judge_attempts(tally: Tally, trace: Trace) -> None:
    attempts = trace.of(Attempt)
    scenario = trace.scenario.to_dict()
    tried = tuple(attempt.backend for attempt in attempts)
    tally.equal(
        ORDER[: max(1, len(tried))], tried, "the chain was tried out of order", scenario=scenario
    )
    doomed = {fault.backend for fault in trace.scenario.faults}
    for position, attempt in enumerate(attempts):
        last = position == len(attempts) - 1
        if attempt.served:
            tally.check(last, f"{attempt.backend} served and the chain went on", scenario=scenario)
            tally.check(
                attempt.backend not in doomed,
                f"{attempt.backend} served although it was made to fail",
                tensor="product",
                expected=f"{attempt.backend} fails",
                got=f"{attempt.backend} served",
                scenario=scenario,
            )
        else:
            tally.check(
                bool(attempt.reason),
                f"{attempt.backend} failed without a reason",
                scenario=scenario,
            )


def _judge_result(tally: Tally, trace: Trace) -> None:
    """One product, by the backend that served, finite and confirmed by float64."""
    scenario = trace.scenario.to_dict()
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
            f"{product.error_f64:.3g}, float32 rounding explains {product.bound:.3g}",
            tensor="product",
            element=product.element,
            expected=f"<= {product.bound:.3g}",
            got=f"{product.error_f64:.3g}",
            scenario=scenario,
        )
    tally.check(bool(served), "the run ended with neither a result nor a halt", scenario=scenario)


def _judge_halt(tally: Tally, trace: Trace) -> None:
    """Nothing served, nothing was returned, everything was tried, and every reason is given."""
    scenario = trace.scenario.to_dict()
    attempts = trace.of(Attempt)
    halted = trace.of(Halt)[-1].reason
    doomed = {fault.backend for fault in trace.scenario.faults}
    tally.check(
        ORDER[-1] in doomed,
        f"the chain halted though nothing was done to {ORDER[-1]}: {halted}",
        scenario=scenario,
    )
    tally.check(not trace.of(Product), "a halted chain returned a product", scenario=scenario)
    for name in ORDER:
        tally.check(
            any(attempt.backend == name and not attempt.served for attempt in attempts),
            f"the chain halted though {name} did not fail: {halted}",
            scenario=scenario,
        )
    for attempt in attempts:
        tally.check(
            attempt.reason in halted,
            f"the halt does not say why {attempt.backend} failed: {halted}",
            expected=attempt.reason,
            got=halted,
            scenario=scenario,
        )


def _note_real_failures(tally: Tally, trace: Trace) -> None:
    """Backends that failed by themselves: their planned faults could not strike."""
    struck = {event.fault.get("backend") for event in trace.of(Injected)}
    for attempt in trace.of(Attempt):
        if not attempt.served and attempt.backend not in struck:
            tally.note(f"{attempt.backend} failed by itself: {attempt.reason}")
        if attempt.software:
            tally.note(f"software adapter {attempt.device}")
