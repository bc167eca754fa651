"""F-DP-004: the chain CUDA -> wgpu -> CPU yields a right, finite result, or says why not.

A failing backend never crashes or fakes a result. Source: distributed-training-v1, F-DP-004.
"""

from __future__ import annotations

import itertools

from entrenar_py.check.clauses import probes
from entrenar_py.check.clauses.check import Check
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import missing
from entrenar_py.check.evidence.needs import Traces
from entrenar_py.shared.faults import OF_ADAPTERS, Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Attempt, Halt, Injected, Product, Trace
from entrenar_py.shared.verdict import Finding, Tally

ORDER = ("cuda", "wgpu", "cpu")  # as the clause gives it
KINDS = ("absent", "init_error", "out_of_memory", "non_finite_output")


def plan(invariant: Invariant) -> list[Scenario]:
    """Plan a chain without faults; chains in which one, two or all backends fail, in every way; and
    an adapter that really fails, as the first of two backends and as the second of three.

    A working backend before a failing one is left out of the chain: it would compute the result,
    and the fault would never strike.
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
    """Return a chain of the backends `failing`, each with its kind of fault, and all later ones."""
    last = ORDER.index(failing[-1]) if failing else -1
    struck = zip(failing, kinds, strict=True)
    faults = tuple(Fault(kind=kind, backend=name) for name, kind in struck)
    return probes.scenario("backend_chain", backends=failing + ORDER[last + 1 :], faults=faults)


def judge(invariant: Invariant, traces: Traces) -> Finding:
    """Judge that every run tried the backends in order, gave a reason for each failure, and ended
    with a product that float64 confirms, or with a halt that names every reason.
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
    """Return the backends of `scenario` in the order of the clause."""
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
            message = f"{attempt.backend} failed without a reason"
            tally.check(bool(attempt.reason), message, scenario=scenario)


def _judge_result(tally: Tally, trace: Trace) -> None:
    """Check that there is one product, by the backend that served, finite and right."""
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
            f"{product.error_f64:.3g}, float32 rounding explains {product.bound:.3g}",
            tensor="product",
            element=product.element,
            expected=f"<= {product.bound:.3g}",
            got=f"{product.error_f64:.3g}",
            scenario=scenario,
        )
    tally.check(bool(served), "the run ended with neither a result nor a halt", scenario=scenario)


def _judge_halt(tally: Tally, trace: Trace) -> None:
    """Check that every backend failed, the halt gives each reason, and nothing was returned."""
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
    """Note backends that failed without a planned fault, and stand-in and software devices."""
    struck = {event.fault.get("backend") for event in trace.of(Injected)}
    for attempt in trace.of(Attempt):
        if not attempt.served and attempt.backend not in struck:
            tally.note(f"{attempt.backend} failed by itself: {attempt.reason}")
        if attempt.device.startswith("stand-in"):
            tally.note(f"{attempt.backend} was simulated by a {attempt.device}")
        probes.note_software(tally, attempt)


ROWS = (
    Check(
        name="fallback",
        id="F-DP-004",
        decides="the chain CUDA, wgpu, CPU gives a right, finite result, or says why not",
        spoken_of="fallback chain degradation dispatch",
        judge=judge,
        plan=plan,
    ),
)
