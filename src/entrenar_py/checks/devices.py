"""The rows of the table of checks that are about devices: what they compute, and at what cost."""

from __future__ import annotations

from entrenar_py.checks import device_results, device_steps, device_training, matmul
from entrenar_py.checks.check import Check
from entrenar_py.checks.needs import ON_CPU

ROWS = (
    Check(
        name="matmul",
        id="F-WGPU-001",
        decides="a matrix product on a device is the CPU's, as far as float32 rounding allows",
        judge=matmul.judge,
        plan=matmul.plan,
        explores=False,
        tolerance_kinds=("absolute",),
        takes_tolerance=True,
    ),
    Check(
        name="device_cost",
        id="F-WGPU-002",
        decides="a step on a device is one upload, one submission, one read-back, nothing else",
        judge=device_steps.judge_cost,
        plan=device_steps.plan,
        explores=False,
    ),
    Check(
        name="device_steps",
        id="F-WGPU-003",
        decides="a step's loss and gradients on a device are off by what rounding explains",
        judge=device_steps.judge_results,
        plan=device_steps.plan,
        explores=False,
        tolerance_kinds=("ulp",),
    ),
    Check(
        name="device_operations",
        id="F-WGPU-004",
        decides="each operation on a device, alone, is off by what rounding explains",
        judge=device_results.judge_operations,
        plan=device_results.plan_operations,
        explores=False,
        tolerance_kinds=("ulp",),
    ),
    Check(
        name="device_repetition",
        id="F-WGPU-005",
        decides="a step that is given the same again gives the same bits, whatever came between",
        judge=device_steps.judge_repetition,
        plan=device_steps.plan,
        explores=False,
    ),
    Check(
        name="device_compilation",
        id="F-WGPU-006",
        decides="a step is traced and compiled once for each number of samples",
        judge=device_steps.judge_compilation,
        plan=device_steps.plan,
        explores=False,
    ),
    Check(
        name="device_finiteness",
        id="F-WGPU-007",
        decides="on a device finite inputs give finite results, and a NaN stays one",
        judge=device_results.judge_finiteness,
        plan=device_results.plan_finiteness,
        explores=False,
    ),
    Check(
        name="device_training",
        id="F-WGPU-008",
        decides="training on a device is training on the CPU, loss by loss",
        judge=device_training.judge,
        plan=device_training.plan,
        needs=(ON_CPU,),
        explores=False,
        tolerance_kinds=("relative",),
        takes_tolerance=True,
    ),
    Check(
        name="device_refusals",
        id="F-WGPU-009",
        decides="what a device has no kernel for is refused, by operation and line",
        judge=device_results.judge_refusals,
        plan=device_results.plan_refusals,
        explores=False,
    ),
)
