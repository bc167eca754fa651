"""F-WGPU-001 to F-WGPU-009: the results on a device, and the cost of a step.

Sources: distributed-training-v1, F-WGPU-001; wgpu-backend-v1. Bounds are derived in
docs/numerics.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from entrenar_py.check import evidence
from entrenar_py.check.clauses.check import Check, judge_each, note_software, probe
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import closeness, missing
from entrenar_py.check.evidence.needs import ON_CPU, Traces
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Declined, Explained, Poisoned, Product, Stepped, Trace
from entrenar_py.shared.verdict import Finding, Tally

# --- matrix products ------------------------------------------------------------------------------

# Options of the system `matmul`. Ragged and prime sizes test every edge of a tile. A long k tests
# the drift of float32 sums, and a large magnitude a case in which an absolute tolerance is
# meaningless. The last two are about the smallest products for which wgpu chooses the kernels with
# medium and large tiles.
PRODUCTS: tuple[dict[str, Any], ...] = (
    {"m": 64, "k": 64, "n": 64},
    {"m": 64, "k": 64, "n": 64, "layout": "both_transposed"},
    {"m": 1, "k": 1, "n": 1},
    {"m": 1, "k": 37, "n": 1},
    {"m": 15, "k": 17, "n": 31, "layout": "a_transposed"},
    {"m": 31, "k": 15, "n": 17, "layout": "b_transposed"},
    {"m": 17, "k": 31, "n": 15, "layout": "both_transposed"},
    {"m": 61, "k": 67, "n": 71, "layout": "b_transposed"},
    {"m": 33, "k": 512, "n": 65},
    {"m": 17, "k": 1024, "n": 48, "layout": "a_transposed"},
    {"m": 29, "k": 101, "n": 13, "magnitude": 1e5},
    {"shapes": [[5, 3, 2], [64, 64, 64], [2, 3, 5]]},
    {"m": 999, "k": 51, "n": 1001, "layout": "a_transposed"},
    {"m": 1924, "k": 260, "n": 1924},
)


def plan_products(invariant: Invariant) -> list[Scenario]:
    """Plan products of the stated shape; also ragged, long, transposed, large and multiple ones."""
    return [
        probe("matmul", seed=seed, backends=("wgpu",), options=options)
        for seed, options in enumerate(PRODUCTS)
    ]


def judge_products(invariant: Invariant, traces: Traces) -> Finding:
    """Judge that every product is finite, has its shape, and is within its bound and the tolerance.

    The float32 bound on the distance from float64 applies to every shape. The clause's absolute
    tolerance on the distance from the CPU's float32 applies only to the stated shape and range.
    """
    tally = Tally(invariant.id)
    for trace in traces:
        if trace.end.status == "failed":
            tally.miss(trace.end.reason)
        for product in trace.of(Product):
            if product.backend != "cpu":  # the CPU compared with itself would prove nothing
                _judge_product(tally, product, trace.scenario, invariant.tolerance)
    nothing = "no matrix product was computed on a GPU"
    return tally.finding(nothing=missing.probed(invariant, nothing))


def _judge_product(
    tally: Tally, product: Product, scenario: Scenario, tolerance: float | None
) -> None:
    m, k, n = product.shape
    what = f"{product.backend} product {m}x{k}x{n} {product.layout}"
    where = {"tensor": "product", "scenario": scenario}
    place = {**where, "element": product.element}
    note_software(tally, product)
    if not tally.equal((m, n), product.result_shape, f"{what} has another shape", **place):
        return
    element = f"at element {product.element}"
    if not tally.check(product.finite, f"{what} is not finite {element}", **place):
        return
    message = (
        f"{what} is off by {product.error_f64:.3g} from float64 {element}, float32 rounding "
        f"explains at most {product.bound:.3g}"
    )
    tally.at_most(product.bound, product.error_f64, message, form=".3g", **place)
    if not product.stated:
        return
    if tolerance is None:
        tally.note("the clause has no tolerance: only the float32 bound was checked")
        return
    # No element is named, since the largest distance from the CPU may be at a different element.
    tally.check(
        product.error_cpu < tolerance,
        f"{what} is off by {product.error_cpu:.3g} from the CPU, the clause allows {tolerance:g}",
        expected=f"< {tolerance:g}",
        got=f"{product.error_cpu:.3g}",
        **where,
    )


# --- results of single operations -----------------------------------------------------------------


def plan_operations(invariant: Invariant) -> list[Scenario]:
    """Plan single operations on wgpu."""
    return [probe("wgpu_operations", backends=("wgpu",))]


def plan_finiteness(invariant: Invariant) -> list[Scenario]:
    """Plan single operations, and training steps of every workload."""
    return [*plan_operations(invariant), *plan_steps(invariant)]


def plan_refusals(invariant: Invariant) -> list[Scenario]:
    """Plan operations, dtypes, sizes and programs that have no kernel."""
    return [probe("wgpu_refusals", backends=("wgpu",))]


def compare_operations(tally: Tally, trace: Trace) -> None:
    """Check that every element of every result is within its float32 rounding bound."""
    for result in trace.of(Explained):
        note_software(tally, result)
        closeness.judge_explained(tally, result, trace)


def compare_finiteness(tally: Tally, trace: Trace) -> None:
    """Check that finite inputs give finite results, and that a NaN stays NaN.

    An element that a NaN reaches on the CPU must be NaN on the device.
    """
    for result in trace.of(Explained):
        message = f"{result.of}: {result.tensor} is not finite, though all its inputs are"
        place = evidence.place(trace, result)
        tally.check(result.finite, message, tensor=result.tensor, **place)
    reached = [result for result in trace.of(Poisoned) if result.reached]
    if trace.of(Explained) and not reached:
        tally.miss(f"no NaN reached a result on {trace.scenario.system}")
    for poisoned in reached:
        note_software(tally, poisoned)
        tally.check(
            not poisoned.lost,
            f"{poisoned.of}: a NaN reaches {poisoned.reached} elements of {poisoned.tensor}, and "
            f"{poisoned.lost} of them are numbers on the device",
            tensor=poisoned.tensor,
            element=poisoned.element,
            expected="nan",
            got="a number",
            **evidence.place(trace, poisoned),
        )


def compare_refusals(tally: Tally, trace: Trace) -> None:
    """Check that each case gives a right result, or a UsageError that names operation and line."""
    for case in trace.of(Declined):
        place = {"tensor": case.case, "scenario": trace.scenario}
        if case.error is None:
            message = f"{case.case}: was not refused, and its result differs from the CPU's"
            tally.check(case.right, message, expected="a UsageError", got="a result", **place)
            continue
        tally.equal("UsageError", case.error, f"{case.case}: the error", **place)
        tally.check(
            case.operation in case.message and case.in_line,
            f"{case.case}: the message does not name {case.operation} and its line: {case.message}",
            expected=f"{case.operation} at a line",
            got=case.message,
            **place,
        )
        tally.equal(0, case.submissions, f"{case.case}: submissions before the refusal", **place)


# --- whole steps ----------------------------------------------------------------------------------

DISPATCHES = 256  # dispatches in one submission, at most
_ALIGNMENT = 256  # bytes; WebGPU's largest min-storage-buffer-offset-alignment
NO_STEP = "no step on a device was recorded"

STEPS: tuple[dict[str, Any], ...] = (
    {"workload": "linear", "options": {"samples": [1, 13]}},
    {"workload": "mlp", "width": 17, "dropout": 0.3},
    {"workload": "decoder", "dropout": 0.1, "options": {"samples": [1, 3]}},
    {"workload": "decoder_full", "options": {"samples": [3]}},
)


def plan_steps(invariant: Invariant) -> list[Scenario]:
    """Plan steps of every workload with odd numbers of samples; some have dropout.

    The largest workload has one number of samples only, since tracing takes long.
    """
    return [probe("wgpu_steps", backends=("wgpu",), **fields) for fields in STEPS]


def _steps(tally: Tally, trace: Trace) -> list[Stepped]:
    steps = trace.of(Stepped)
    for step in steps[:1]:
        note_software(tally, step)
    return steps


def _later(tally: Tally, trace: Trace) -> Iterator[Stepped]:
    steps = _steps(tally, trace)
    later = [step for step in steps if step.earlier]
    if steps and not later:
        tally.miss(f"no step of {trace.scenario.workload} had as many samples as an earlier one")
    yield from later


def compare_cost(tally: Tally, trace: Trace) -> None:
    """Check the cost of each step with as many samples as an earlier step.

    It must make one upload, one submission for every DISPATCHES and one read-back, upload only its
    inputs, and compute nothing on the CPU.
    """
    for step in _later(tally, trace):
        what = f"a step of {step.num_samples} samples of {trace.scenario.workload}"
        place = evidence.place(trace, step)
        submissions = max(1, -(-step.dispatches // DISPATCHES))
        tally.equal(submissions, step.submissions, f"{what}: submissions", **place)
        tally.equal(1, step.read_backs, f"{what}: read-backs", **place)
        tally.equal(1, step.uploads, f"{what}: uploads", **place)
        most = step.declared_bytes + _ALIGNMENT * step.num_inputs
        tally.check(
            step.declared_bytes <= step.upload_bytes <= most,
            f"{what} uploaded {step.upload_bytes} bytes for weights, samples and masks of "
            f"{step.declared_bytes} bytes",
            expected=f"{step.declared_bytes} to {most}",
            got=str(step.upload_bytes),
            **place,
        )
        tally.equal((), step.on_host, f"{what} was computed on the CPU in part", **place)
        tally.check(step.dispatches > 0, f"{what} dispatched nothing", **place)


def compare_results(tally: Tally, trace: Trace) -> None:
    """Check that the errors of the loss and of every gradient are within their rounding bounds."""
    results = trace.of(Explained)
    if _steps(tally, trace) and not results:
        tally.miss(f"no result of {trace.scenario.workload} was compared with float64")
    for result in results:
        closeness.judge_explained(tally, result, trace)


def compare_repetition(tally: Tally, trace: Trace) -> None:
    """Check that steps with the same inputs give the same bits, whatever ran in between."""
    first: dict[str, Stepped] = {}
    repeated = 0
    for step in _steps(tally, trace):
        before = first.setdefault(step.given, step)
        if before is step:
            continue
        repeated += 1
        closeness.compare_exact(
            tally,
            before.results,
            step.results,
            f"step {step.step} had the same input as step {before.step} ({step.given}) and gave "
            "a different result",
            **evidence.place(trace, step),
        )
    if first and not repeated:
        tally.miss(f"no two steps of {trace.scenario.workload} were given the same input")


def compare_compilation(tally: Tally, trace: Trace) -> None:
    """Check that a step with as many samples as an earlier one compiles and traces nothing."""
    for step in _later(tally, trace):
        what = f"step {step.earlier + 1} of {step.num_samples} samples of {trace.scenario.workload}"
        place = evidence.place(trace, step)
        tally.equal(0, step.compiled, f"{what} compiled shaders or pipelines", **place)
        tally.equal(0, step.traced, f"{what} was traced again, operation by operation", **place)


# --- training -------------------------------------------------------------------------------------

CPU = ("cpu",)
NUM_STEPS = 100
FALLEN = 0.99  # relative to the first loss: two runs that don't train at all would also agree


def plan_training(invariant: Invariant) -> list[Scenario]:
    """Plan reference training with one worker and one shard, so that a device has whole steps."""
    fields: dict[str, Any] = {"num_shards": 1, "num_samples": 21, "batch_size": 7}
    fields |= {"num_steps": NUM_STEPS, "learning_rate": 0.1, "backends": ("wgpu",)}
    return [probe("reference", workload=name, **fields) for name in ("mlp", "decoder")]


def judge_training(invariant: Invariant, runs: Traces) -> Finding:
    """Judge that the losses on the device are those on the CPU, and that both fall.

    In each step the tolerance is relative to the CPU's first loss, or to its loss in this step if
    that is larger.
    """
    tally = Tally(invariant.id)
    runs = evidence.usable_runs(runs, tally)
    if runs.base is not None and runs.base.scenario.backends != CPU:
        for model in runs.of(ON_CPU):
            _compare_training(tally, model, runs.base, invariant.tolerance)
        if not runs.of(ON_CPU):
            tally.miss("there is no run on the CPU to compare with")
    return tally.finding(nothing=missing.probed(invariant, "no training on a device was recorded"))


def _compare_training(tally: Tally, model: Trace, trace: Trace, tolerance: float | None) -> None:
    what = f"{trace.scenario.workload} on {trace.scenario.backends[0]}"
    if tolerance is None:
        tally.miss("the clause has no tolerance: give it one, with tolerance_kind: relative")
        return
    expected, got = _losses(model), _losses(trace)
    if len(expected) < trace.scenario.num_steps or expected.keys() != got.keys():
        tally.miss(f"{what}: {len(got)} losses of {trace.scenario.num_steps} steps were recorded")
        return
    first = expected[min(expected)]
    for step, right in expected.items():
        allowed = tolerance * max(abs(first), abs(right))
        tally.check(
            abs(got[step] - right) <= allowed,
            f"{what}: the loss of step {step} is {got[step]:.7g}, on the CPU {right:.7g}",
            step=step,
            expected=f"{right:.7g} +- {allowed:.2g}",
            got=f"{got[step]:.7g}",
            scenario=trace.scenario,
        )
    last = max(expected)
    for name, losses in (("the CPU", expected), (trace.scenario.backends[0], got)):
        message = f"{trace.scenario.workload} on {name} does not learn"
        place = {"step": last, "scenario": trace.scenario}
        tally.at_most(FALLEN * first, losses[last], message, form=".7g", **place)


def _losses(trace: Trace) -> dict[int, float]:
    losses = {}
    for step, by_rank in evidence.ranks_by_step(evidence.with_losses(trace)):
        loss = evidence.any_rank(by_rank).loss
        if loss is not None:
            losses[step] = loss
    return losses


# --- the rows of the table ------------------------------------------------------------------------


ROWS = (
    Check(
        name="matmul",
        id="F-WGPU-001",
        decides="a matrix product on a device differs from the CPU's only by float32 rounding",
        spoken_of="matmul gemm matrix product",
        judge=judge_products,
        plan=plan_products,
        tolerance_kinds=("absolute",),
        takes_tolerance=True,
    ),
    Check(
        name="device_cost",
        id="F-WGPU-002",
        decides="a step on a device is one upload, few submissions and one read-back, nothing else",
        spoken_of="submission read-back transfers synchronize launches",
        judge=judge_each(compare_cost, NO_STEP),
        plan=plan_steps,
    ),
    Check(
        name="device_steps",
        id="F-WGPU-003",
        decides="a step's loss and gradients on a device are within rounding of float64",
        spoken_of="wgpu kernels gpu parity gradients backward",
        judge=judge_each(compare_results, NO_STEP),
        plan=plan_steps,
        tolerance_kinds=("ulp",),
    ),
    Check(
        name="device_operations",
        id="F-WGPU-004",
        decides="each single operation on a device is within rounding of float64",
        spoken_of="wgpu wgsl kernel operation accuracy",
        judge=judge_each(compare_operations, "no operation was tested on a device"),
        plan=plan_operations,
        tolerance_kinds=("ulp",),
    ),
    Check(
        name="device_repetition",
        id="F-WGPU-005",
        decides="a step on a device, repeated with the same inputs, has the same bits",
        judge=judge_each(compare_repetition, NO_STEP),
        plan=plan_steps,
    ),
    Check(
        name="device_compilation",
        id="F-WGPU-006",
        decides="a step on a device is traced and compiled once for each number of samples",
        judge=judge_each(compare_compilation, NO_STEP),
        plan=plan_steps,
    ),
    Check(
        name="device_finiteness",
        id="F-WGPU-007",
        decides="on a device finite inputs give finite results, and a NaN stays a NaN",
        judge=judge_each(compare_finiteness, "no NaN was given to a device"),
        plan=plan_finiteness,
    ),
    Check(
        name="device_training",
        id="F-WGPU-008",
        decides="training on a device has the losses of training on the CPU",
        judge=judge_training,
        plan=plan_training,
        needs=(ON_CPU,),
        tolerance_kinds=("relative",),
        takes_tolerance=True,
    ),
    Check(
        name="device_refusals",
        id="F-WGPU-009",
        decides="an operation without a kernel is refused, and the refusal names it and its line",
        judge=judge_each(compare_refusals, "no operation without a kernel was requested"),
        plan=plan_refusals,
    ),
)
