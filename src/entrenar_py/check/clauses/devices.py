"""The checks of devices, as rows of the table of checks: results, and the cost of a step."""

from __future__ import annotations

from entrenar_py.check.clauses import device_results, device_steps, device_training, matmul, probes
from entrenar_py.check.clauses.check import Check
from entrenar_py.check.evidence.needs import ON_CPU

ROWS = (
    Check(
        name="matmul",
        id="F-WGPU-001",
        decides="a matrix product on a device is the CPU's, as far as float32 rounding allows",
        spoken_of="matmul gemm matrix product",
        judge=matmul.judge,
        plan=matmul.plan,
        tolerance_kinds=("absolute",),
        takes_tolerance=True,
    ),
    Check(
        name="device_cost",
        id="F-WGPU-002",
        decides="a step on a device is one upload, few submissions, one read-back, nothing else",
        spoken_of="submission read-back transfers synchronize launches",
        judge=probes.judge(device_steps.compare_cost, device_steps.NOTHING),
        plan=device_steps.plan,
    ),
    Check(
        name="device_steps",
        id="F-WGPU-003",
        decides="a step's loss and gradients on a device are off by what rounding explains",
        spoken_of="wgpu kernels gpu parity gradients backward",
        judge=probes.judge(device_steps.compare_results, device_steps.NOTHING),
        plan=device_steps.plan,
        tolerance_kinds=("ulp",),
    ),
    Check(
        name="device_operations",
        id="F-WGPU-004",
        decides="each operation on a device, alone, is off by what rounding explains",
        spoken_of="wgpu wgsl kernel operation accuracy",
        judge=probes.judge(device_results.compare_operations, "no operation was tried on a device"),
        plan=device_results.plan_operations,
        tolerance_kinds=("ulp",),
    ),
    Check(
        name="device_repetition",
        id="F-WGPU-005",
        decides="a step that is given the same again gives the same bits, whatever came between",
        judge=probes.judge(device_steps.compare_repetition, device_steps.NOTHING),
        plan=device_steps.plan,
    ),
    Check(
        name="device_compilation",
        id="F-WGPU-006",
        decides="a step is traced and compiled once for each number of samples",
        judge=probes.judge(device_steps.compare_compilation, device_steps.NOTHING),
        plan=device_steps.plan,
    ),
    Check(
        name="device_finiteness",
        id="F-WGPU-007",
        decides="on a device finite inputs give finite results, and a NaN stays one",
        judge=probes.judge(device_results.compare_finiteness, "no NaN was given to a device"),
        plan=device_results.plan_finiteness,
    ),
    Check(
        name="device_training",
        id="F-WGPU-008",
        decides="training on a device is training on the CPU, loss by loss",
        judge=device_training.judge,
        plan=device_training.plan,
        needs=(ON_CPU,),
        tolerance_kinds=("relative",),
        takes_tolerance=True,
    ),
    Check(
        name="device_refusals",
        id="F-WGPU-009",
        decides="what a device has no kernel for is refused, by operation and line",
        judge=probes.judge(device_results.compare_refusals, "nothing was asked that has no kernel"),
        plan=device_results.plan_refusals,
    ),
)
